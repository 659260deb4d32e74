//! Parts of the report as Markdown.

/// A part of the report.
pub trait Table {
    /// Markdown: a heading and a table or a sentence.
    fn table(&self) -> String;
    /// Checks that failed.
    fn wrong(&self) -> usize;
}

/// A Markdown table.
pub fn markdown(heading: &str, columns: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let names: Vec<String> = columns.iter().map(|c| (*c).to_owned()).collect();
    let rule = format!("|{}\n", "---|".repeat(columns.len()));
    let rows: String = rows.map(|r| line(&r)).collect();
    format!("## {heading}\n\n{}{rule}{rows}", line(&names))
}

/// `right`, or what is wrong in capitals.
pub fn verdict(is_right: bool) -> String {
    if is_right { "right".into() } else { "WRONG".into() }
}
