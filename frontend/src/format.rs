//! The formatter: prints a text from its tree, two spaces per block, at most 120 columns, one statement per line,
//! comments and single blank lines kept. Formatting a formatted text changes nothing.

use crate::ast::*;
use crate::parse::parse;
use ir::diag::{Diagnostic, Sources};

const WIDTH: usize = 120;
const INDENT: usize = 2;
/// Indentation of a statement's further lines, outside of any bracket.
const HANGING: usize = 4;

/// A text in the one standard layout.
///
/// # Errors
/// The text does not parse; all syntax errors.
pub fn format(name: &str, text: &str) -> Result<String, Vec<Diagnostic>> {
    let ast = parse(&mut Sources::default(), name, text)?;
    let mut printer = Printer { out: String::new(), indent: 0 };
    printer.stmts(&ast.items);
    printer.comments(&ast.tail);
    Ok(printer.out)
}

/// A statement's text with the places where it may be broken.
#[derive(Clone, Debug)]
enum Token {
    Text(String),
    Open(&'static str),
    Close(&'static str),
    /// A space that may become a line break; operators are broken at after commas of the same depth.
    Space {
        operator: bool,
    },
}

#[derive(Default)]
struct Line {
    tokens: Vec<Token>,
}

struct Printer {
    out: String,
    indent: usize,
}

impl Printer {
    fn comments(&mut self, comments: &[String]) {
        for comment in comments {
            if comment.is_empty() {
                self.out.push('\n');
            } else {
                self.out.push_str(&" ".repeat(self.indent));
                self.out.push_str(comment);
                self.out.push('\n');
            }
        }
    }

    fn stmts(&mut self, stmts: &[Stmt]) {
        for stmt in stmts {
            if stmt.trivia.blank_before {
                self.out.push('\n');
            }
            self.comments(&stmt.trivia.before);
            self.stmt(stmt);
            if let Some(comment) = &stmt.trivia.after {
                self.out.pop();
                self.out.push_str("  ");
                self.out.push_str(comment);
                self.out.push('\n');
            }
        }
    }

    fn block(&mut self, block: &Block) {
        self.out.push_str(" {\n");
        self.indent += INDENT;
        self.stmts(&block.stmts);
        self.comments(&block.tail);
        self.indent -= INDENT;
        self.out.push_str(&" ".repeat(self.indent));
        self.out.push_str("}\n");
    }

    /// Prints a line without its end, broken where it is too long; `tail` characters must fit behind it.
    fn head(&mut self, line: &Line, tail: usize) {
        self.out.push_str(&" ".repeat(self.indent));
        self.out.push_str(&layout(&line.tokens, self.indent, tail));
    }

    fn simple(&mut self, line: &Line) {
        self.head(line, 1);
        self.out.push_str(";\n");
    }

    fn with_block(&mut self, line: &Line, block: &Block) {
        self.head(line, 2);
        self.block(block);
    }

    fn stmt(&mut self, stmt: &Stmt) {
        let mut line = Line::default();
        match &stmt.kind {
            StmtKind::Import { path, alias } => {
                line.text("import ").quoted(path).alias(alias.as_ref());
                self.simple(&line);
            }
            StmtKind::Model(model) => {
                line.text("model ").text(&model.name.name).headers(&model.settings);
                self.with_block(&line, &model.body);
            }
            StmtKind::Train(block) => self.with_block(line.text("train"), block),
            StmtKind::Plan(block) => self.with_block(line.text("plan"), block),
            StmtKind::Weights { name, block } => self.with_block(line.text("weights ").text(&name.name), block),
            StmtKind::Fn(function) => {
                line.text(if function.op { "@op fn " } else { "fn " }).text(&function.name.name).headers(&function.params);
                for (i, result) in function.results.iter().enumerate() {
                    line.text(if i == 0 { " -> " } else { ", " }).type_expr(result);
                }
                match &function.body {
                    Body::Block(block) => self.with_block(&line, block),
                    Body::Short(expr) => {
                        line.text(" =").space().expr(expr);
                        self.simple(&line);
                    }
                }
            }
            StmtKind::Dim(items) => {
                line.text("dim ");
                for (i, (name, size)) in items.iter().enumerate() {
                    if i > 0 {
                        line.text(",").space();
                    }
                    line.text(&name.name).initial(" = ", size.as_ref());
                }
                self.simple(&line);
            }
            StmtKind::Let { names, value } => self.simple(line.text("let ").names(names).initial(" = ", Some(value))),
            StmtKind::Assign { names, value } => self.simple(line.names(names).initial(" = ", Some(value))),
            StmtKind::Input { names, ty, value, attributes } => {
                line.text("input ").names(names).text(": ").type_expr(ty).initial(" = ", value.as_ref());
                self.simple(line.attributes(attributes));
            }
            StmtKind::Param(storage) => self.simple(line.text("param ").storage(storage)),
            StmtKind::State(storage) => self.simple(line.text("state ").storage(storage)),
            StmtKind::Update { name, value } => self.simple(line.text("update ").text(&name.name).initial(" = ", Some(value))),
            StmtKind::If(branch) => self.branches(branch),
            StmtKind::Repeat(repeat) => {
                line.text("repeat ");
                if let Some(counter) = &repeat.counter {
                    line.text(&counter.name).text(" in ");
                }
                line.text(&repeat.count.name).alias(repeat.alias.as_ref());
                self.with_block(&line, &repeat.body);
            }
            StmtKind::Return(values) => self.simple(line.text("return ").list(values)),
            StmtKind::Call(call) => self.simple(line.expr(call)),
            StmtKind::Loss { name, value } => {
                line.text("loss ");
                if let Some(name) = name {
                    line.text(&name.name).text(" = ");
                }
                self.simple(line.expr(value));
            }
            StmtKind::Metric { name, value } => self.simple(line.text("metric ").text(&name.name).initial(" = ", Some(value))),
            StmtKind::Output(names) => self.simple(line.text("output ").names(names)),
            StmtKind::Generate { name, call } => self.simple(line.text("generate ").text(&name.name).initial(" = ", Some(call))),
            StmtKind::Setting { path, tiers } => {
                line.text(&path.to_string()).text(": ");
                for (i, tier) in tiers.iter().enumerate() {
                    if i > 0 {
                        line.text(" | ");
                    }
                    line.list(tier);
                }
                self.simple(&line);
            }
            StmtKind::Group { patterns, block } => {
                line.text("group ");
                for (i, pattern) in patterns.iter().enumerate() {
                    if i > 0 {
                        line.text(",").space();
                    }
                    line.quoted(pattern);
                }
                self.with_block(&line, block);
            }
            StmtKind::Weight { paths, template, copies, layout } => {
                for (i, path) in paths.iter().enumerate() {
                    if i > 0 {
                        line.text(",").space();
                    }
                    line.text(&path.to_string());
                }
                line.text(" = ").quoted(template);
                for copy in copies {
                    line.text(",").space().quoted(copy);
                }
                if let Some(products) = layout {
                    line.space().open("[");
                    for (i, product) in products.iter().enumerate() {
                        if i > 0 {
                            line.text(",").space();
                        }
                        line.product(product);
                    }
                    line.close("]");
                }
                self.simple(&line);
            }
            // Only a text without errors is printed.
            StmtKind::Bad(_) => {}
        }
    }

    fn branches(&mut self, branch: &If) {
        for (i, (cond, block)) in branch.branches.iter().enumerate() {
            if i > 0 {
                self.out.pop(); // This drops the newline before `else if`.
                self.out.push_str(" else if ");
                self.out.push_str(&layout(&Line::default().expr(cond).tokens, self.indent + "} else if ".len(), 2));
                self.block(block);
            } else {
                self.with_block(Line::default().text("if ").expr(cond), block);
            }
        }
        if let Some(block) = &branch.otherwise {
            self.out.pop();
            self.out.push_str(" else");
            self.block(block);
        }
    }
}

impl Line {
    fn text(&mut self, text: &str) -> &mut Self {
        self.tokens.push(Token::Text(text.into()));
        self
    }

    fn space(&mut self) -> &mut Self {
        self.tokens.push(Token::Space { operator: false });
        self
    }

    fn open(&mut self, bracket: &'static str) -> &mut Self {
        self.tokens.push(Token::Open(bracket));
        self
    }

    fn close(&mut self, bracket: &'static str) -> &mut Self {
        self.tokens.push(Token::Close(bracket));
        self
    }

    fn quoted(&mut self, text: &Text) -> &mut Self {
        self.text(&format!("\"{}\"", text.text))
    }

    fn names(&mut self, names: &[Ident]) -> &mut Self {
        let names: Vec<&str> = names.iter().map(|n| &*n.name).collect();
        self.text(&names.join(", "))
    }

    fn alias(&mut self, alias: Option<&Ident>) -> &mut Self {
        if let Some(alias) = alias {
            self.text(" as ").text(&alias.name);
        }
        self
    }

    fn initial(&mut self, sign: &str, value: Option<&Expr>) -> &mut Self {
        if let Some(value) = value {
            self.text(sign).expr(value);
        }
        self
    }

    fn list(&mut self, values: &[Expr]) -> &mut Self {
        for (i, value) in values.iter().enumerate() {
            if i > 0 {
                self.text(",").space();
            }
            self.expr(value);
        }
        self
    }

    fn headers(&mut self, headers: &[Header]) -> &mut Self {
        self.open("(");
        for (i, header) in headers.iter().enumerate() {
            if i > 0 {
                self.text(",").space();
            }
            self.text(&header.name.name);
            match &header.kind {
                None => {}
                Some(ParamKind::Type(ty)) => {
                    self.text(": ").type_expr(ty);
                }
                Some(ParamKind::Int) => {
                    self.text(": int");
                }
                Some(ParamKind::Real) => {
                    self.text(": real");
                }
                Some(ParamKind::Bool) => {
                    self.text(": bool");
                }
                Some(ParamKind::Text) => {
                    self.text(": text");
                }
                Some(ParamKind::Reals) => {
                    self.text(": reals");
                }
                Some(ParamKind::Dim) => {
                    self.text(": dim");
                }
                Some(ParamKind::Dims) => {
                    self.text(": dims");
                }
            }
            self.initial(" = ", header.default.as_ref());
        }
        self.close(")")
    }

    fn type_expr(&mut self, ty: &TypeExpr) -> &mut Self {
        if let Some(dtype) = &ty.dtype {
            self.text(&dtype.name);
        }
        self.open("[");
        for (i, dim) in ty.dims.iter().enumerate() {
            if i > 0 {
                self.text(",").space();
            }
            match dim {
                TypeDim::Rest => self.text(".."),
                TypeDim::Element(element) => self.element(element),
            };
        }
        self.close("]")
    }

    fn element(&mut self, element: &Element) -> &mut Self {
        self.expr(&element.expr);
        if element.spread {
            self.text("..");
        }
        self
    }

    fn storage(&mut self, storage: &Storage) -> &mut Self {
        self.names(&storage.names).text(": ").type_expr(&storage.ty);
        match &storage.init {
            Init::Drawn(expr) => self.initial(" ~ ", Some(expr)),
            Init::Value(expr) => self.initial(" = ", Some(expr)),
        };
        self.attributes(&storage.attributes)
    }

    fn attributes(&mut self, attributes: &[Ident]) -> &mut Self {
        for attribute in attributes {
            self.text(" @").text(&attribute.name);
        }
        self
    }

    fn product(&mut self, product: &Product) -> &mut Self {
        for (i, atom) in product.atoms.iter().enumerate() {
            if i > 0 {
                self.text("*");
            }
            match atom {
                Atom::Dim(name) => {
                    self.text(&name.name);
                }
                Atom::Choice(parts) => {
                    self.open("(");
                    for (i, part) in parts.iter().enumerate() {
                        if i > 0 {
                            self.text(" |").space();
                        }
                        self.product(part);
                    }
                    self.close(")");
                }
            }
        }
        self
    }

    fn expr(&mut self, expr: &Expr) -> &mut Self {
        match &expr.kind {
            ExprKind::Int(_, text) | ExprKind::Real(_, text) | ExprKind::Name(text) => self.text(text),
            ExprKind::Text(text) => self.text(&format!("\"{text}\"")),
            ExprKind::Bool(b) => self.text(if *b { "true" } else { "false" }),
            ExprKind::None => self.text("none"),
            // Only a text without errors is printed.
            ExprKind::Bad => self,
            ExprKind::Paren(inner) => self.open("(").expr(inner).close(")"),
            ExprKind::List(elements) => {
                self.open("[");
                for (i, element) in elements.iter().enumerate() {
                    if i > 0 {
                        self.text(",").space();
                    }
                    self.element(element);
                }
                self.close("]")
            }
            ExprKind::Call(call) => self.call(call),
            ExprKind::Index { base, items } => {
                self.expr(base).open("[");
                for (i, (name, index)) in items.iter().enumerate() {
                    if i > 0 {
                        self.text(",").space();
                    }
                    self.text(&name.name).text(": ").expr(index);
                }
                self.close("]")
            }
            ExprKind::Unary { op: UnaryOp::Neg, arg } => self.text("-").expr(arg),
            ExprKind::Unary { op: UnaryOp::Not, arg } => self.text("not ").expr(arg),
            ExprKind::Binary { op, left, right, .. } => {
                self.expr(left);
                self.tokens.push(Token::Space { operator: true });
                self.text(op.symbol()).text(" ").expr(right)
            }
        }
    }

    fn call(&mut self, call: &Call) -> &mut Self {
        self.text(&call.path.to_string()).open("(");
        for (i, arg) in call.args.iter().enumerate() {
            if i > 0 {
                self.text(",").space();
            }
            if let Some(name) = &arg.name {
                self.text(&name.name).text(": ");
            }
            self.expr(&arg.value).initial(" -> ", arg.to.as_ref());
        }
        self.close(")").alias(call.alias.as_ref())
    }
}

/// Joins tokens; where a line gets too long, breaks it at the outermost of its spaces, the last of these that fits.
/// Lines after the first begin below the inside of the bracket they are in.
fn layout(tokens: &[Token], start: usize, tail: usize) -> String {
    let mut out = String::new();
    let mut column = start;
    // The column of the inside of each open bracket.
    let mut brackets: Vec<usize> = vec![];
    // The best place to break this line: its rank (lower is better), its token, the output's length and the open
    // brackets there.
    let mut best: Option<(usize, usize, usize, Vec<usize>)> = None;
    let mut i = 0;
    while i < tokens.len() {
        let text = match &tokens[i] {
            Token::Text(text) => text.as_str(),
            Token::Open(bracket) | Token::Close(bracket) => bracket,
            Token::Space { .. } => " ",
        };
        let width = text.chars().count();
        let reserve = if i + 1 == tokens.len() { tail } else { 0 };
        if column + width + reserve > WIDTH
            && !matches!(tokens[i], Token::Space { .. })
            && let Some((_, at, length, open)) = best.take()
        {
            out.truncate(length);
            let indent = open.last().copied().unwrap_or(start + HANGING);
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
            brackets = open;
            i = at + 1;
            continue;
        }
        match &tokens[i] {
            Token::Open(_) => brackets.push(column + width),
            Token::Close(_) => {
                brackets.pop();
            }
            Token::Space { operator } => {
                let rank = brackets.len() * 2 + usize::from(*operator);
                if best.as_ref().is_none_or(|b| rank <= b.0) {
                    best = Some((rank, i, out.len(), brackets.clone()));
                }
            }
            Token::Text(_) => {}
        }
        out.push_str(text);
        column += width;
        i += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::format;

    fn check(text: &str, expected: &str) {
        let once = format("t.mdl", text).expect("a text that parses");
        assert_eq!(once, expected);
        assert_eq!(format("t.mdl", &once).expect("a formatted text"), once, "not stable");
    }

    #[test]
    fn one_statement_per_line() {
        check("plan{dp:batch;tp :heads,ffn|hidden;}", "plan {\n  dp: batch;\n  tp: heads, ffn | hidden;\n}\n");
    }

    #[test]
    fn comments_and_single_blank_lines_stay() {
        check(
            "// head\n\n\n\nfn f(x) = x; // end\n\n\n// before\nfn g(x) {\n// inside\nreturn -x; }\n// last\n",
            "// head\n\nfn f(x) = x;  // end\n\n// before\nfn g(x) {\n  // inside\n  return -x;\n}\n// last\n",
        );
    }

    #[test]
    fn a_comment_inside_a_statement_moves_before_it() {
        check("fn f(x) = x + // why\n 1;", "// why\nfn f(x) = x + 1;\n");
    }

    #[test]
    fn numbers_keep_their_spelling_and_parentheses_stay() {
        check("fn f(x)=((x)+50_304)*1e-5^-2;", "fn f(x) = ((x) + 50_304) * 1e-5 ^ -2;\n");
    }

    #[test]
    fn else_stands_with_its_brace() {
        check(
            "fn f(x){if a{return 1;}// one\nelse if b{return 2;}else{return 3;}// three\n}",
            "fn f(x) {\n  if a {\n    return 1;\n  } else if b {\n    return 2;\n  } else {\n    return 3;\n    // three\n  }  // one\n}\n",
        );
    }

    #[test]
    fn long_lines_break_inside_the_outermost_bracket() {
        let name = "a_rather_long_argument_name";
        let text = format!("fn f({name}1 = 1, {name}2 = 2, {name}3 = 3, {name}4 = 4) = g({name}1);");
        let expected = format!("fn f({name}1 = 1, {name}2 = 2, {name}3 = 3,\n     {name}4 = 4) = g({name}1);\n");
        check(&text, &expected);
    }
}
