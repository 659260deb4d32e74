//! Diagnostics as text, with their source lines.

use annotate_snippets::renderer::DecorStyle;
use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use ir::diag::{Diagnostic, Severity, Sources, Span};
use std::ops::Range;

/// How a diagnostic is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without escape sequences, as for files.
    Plain,
    /// With ANSI escape sequences, for terminals.
    Coloured,
}

/// A diagnostic as the user reads it; several lines, the last without a newline.
pub fn render(diagnostic: &Diagnostic, sources: &Sources, style: Style) -> String {
    let level = match diagnostic.severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
    };
    let mut group = level.primary_title(diagnostic.message.as_str()).id(diagnostic.code.as_str()).elements(snippets(diagnostic, sources));
    for note in &diagnostic.notes {
        group = group.element(Level::NOTE.message(note.as_str()));
    }
    for help in &diagnostic.help {
        group = group.element(Level::HELP.message(help.to_string()));
    }
    let renderer = match style {
        Style::Plain => Renderer::plain(),
        Style::Coloured => Renderer::styled(),
    };
    let report: [Group<'_>; 1] = [group];
    renderer.decor_style(DecorStyle::Ascii).render(&report)
}

/// One snippet per file that has labels, in the order of the labels.
fn snippets<'a>(diagnostic: &'a Diagnostic, sources: &'a Sources) -> Vec<Snippet<'a, annotate_snippets::Annotation<'a>>> {
    let mut files: Vec<u16> = vec![];
    for label in &diagnostic.labels {
        if !files.contains(&label.span.file) {
            files.push(label.span.file);
        }
    }
    let mut out = vec![];
    for file in files {
        let Some(source) = sources.files.get(usize::from(file)) else { continue };
        let mut snippet = Snippet::source(source.text.as_str()).path(source.name.as_str());
        for (i, label) in diagnostic.labels.iter().enumerate().filter(|(_, l)| l.span.file == file) {
            let kind = if i == 0 { AnnotationKind::Primary } else { AnnotationKind::Context };
            snippet = snippet.annotation(kind.span(bytes(label.span, &source.text)).label(label.text.as_str()));
        }
        out.push(snippet);
    }
    out
}

/// The bytes of a span, moved to character borders of the text; a span over several lines is cut to its first.
fn bytes(span: Span, text: &str) -> Range<usize> {
    let line = span.line.saturating_sub(1) as usize;
    let start_of_line = if line == 0 { 0 } else { text.match_indices('\n').nth(line - 1).map_or(text.len(), |(i, _)| i + 1) };
    let end_of_line = text[start_of_line..].find('\n').map_or(text.len(), |n| start_of_line + n);
    let mut start = (start_of_line + span.col.saturating_sub(1) as usize).min(end_of_line);
    let mut end = start.saturating_add(span.len as usize).min(end_of_line);
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    while !text.is_char_boundary(end) {
        end += 1;
    }
    start..end
}
