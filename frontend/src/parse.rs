//! From the pieces of a text to its tree. Each piece is parsed alone, so each bad one gives exactly one error.

use crate::ast::*;
use crate::build::{Builder, MdlParser, Rule};
use crate::foreign;
use crate::names::nearest;
use crate::repair;
use crate::split::{End, Lines, Piece, Pieces, check_brackets, split};
use ir::diag::{Diagnostic, Source, Sources, Span};
use pest::Parser;
use pest::error::{ErrorVariant, InputLocation};
use pest::iterators::Pair;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;

/// Rule calls that pest may make for one statement; a long statement of a real model needs some ten thousand.
const CALL_LIMIT: usize = 5_000_000;
const MAX_STATEMENT: usize = 64 * 1024;
/// The most mistakes that are looked for in one statement. After each it is parsed again.
const MAX_MISTAKES: usize = 16;

#[derive(Clone, Copy, PartialEq)]
enum StmtContext {
    File,
    Block,
    Settings,
    Weights,
}

impl StmtContext {
    fn words(self) -> &'static [&'static str] {
        match self {
            StmtContext::File => &["import", "fn", "model", "train", "plan", "weights"],
            StmtContext::Block => {
                &["dim", "let", "input", "param", "state", "update", "if", "repeat", "return", "fn", "loss", "metric", "output", "generate"]
            }
            StmtContext::Settings => &["group"],
            StmtContext::Weights => &[],
        }
    }
}

/// Parses a text and adds it to the sources. What could not be parsed stands in the tree as [`StmtKind::Bad`]; each
/// has an error.
pub fn parse_all(sources: &mut Sources, name: &str, text: &str) -> (Ast, Vec<Diagnostic>) {
    let file = u16::try_from(sources.files.len()).unwrap_or(u16::MAX);
    sources.files.push(Source { name: name.into(), text: text.into() });
    pest::set_call_limit(NonZeroUsize::new(CALL_LIMIT));
    let lines = Lines::new(file, text);
    let (pieces, errors) = split(&lines);
    let mut parser = FileParser { lines: &lines, errors };
    let block = parser.block(pieces, StmtContext::File);
    if block.stmts.is_empty() && parser.errors.is_empty() {
        let e = Diagnostic::error("E0112", format!("`{name}` is empty")).label(lines.span(0..0), "no model, function or section");
        parser.errors.push(e.help("a file has a `model name(batch, ..) { .. }`"));
    }
    (Ast { file, items: block.stmts, tail: block.tail }, parser.errors)
}

/// Parses a text and adds it to the sources; all errors if there is any.
pub fn parse(sources: &mut Sources, name: &str, text: &str) -> Result<Ast, Vec<Diagnostic>> {
    let (ast, errors) = parse_all(sources, name, text);
    if errors.is_empty() { Ok(ast) } else { Err(errors) }
}

struct FileParser<'l, 't> {
    lines: &'l Lines<'t>,
    errors: Vec<Diagnostic>,
}

impl FileParser<'_, '_> {
    fn block(&mut self, pieces: Pieces, place: StmtContext) -> Block {
        let mut stmts: Vec<Stmt> = vec![];
        let mut misplaced = false;
        for piece in pieces.pieces {
            let is_else = place == StmtContext::Block && self.first_word(&piece.head) == "else";
            if place == StmtContext::File
                && std::mem::replace(&mut misplaced, false)
                && StmtContext::Block.words().contains(&self.first_word(&piece.head))
            {
                misplaced = true; // A run of statements outside of a model gives one error.
                continue;
            }
            let before = self.errors.len();
            let new = self.piece(piece, place);
            misplaced = self.errors[before..].iter().any(|e| e.code == "E0109");
            if is_else {
                self.attach_else(&mut stmts, new);
            } else {
                stmts.extend(new);
            }
        }
        Block { stmts, tail: pieces.tail, end: self.lines.span(pieces.close) }
    }

    /// Attaches an `else`, which was parsed as a branch without its `if`, to the `if` before.
    fn attach_else(&mut self, stmts: &mut [Stmt], new: Vec<Stmt>) {
        for stmt in new {
            let (span, StmtKind::If(branch)) = (stmt.span, stmt.kind) else { continue };
            let Some(Stmt { kind: StmtKind::If(first), trivia, .. }) = stmts.last_mut() else {
                if !matches!(stmts.last(), Some(Stmt { kind: StmtKind::Bad(_), .. })) {
                    let e = Diagnostic::error("E0101", "an `else` without an `if`").label(span, "no `if` block ends before it");
                    self.errors.push(e.help("`if condition { .. } else { .. }`"));
                }
                continue;
            };
            if first.otherwise.is_some() {
                let e = Diagnostic::error("E0101", "a second `else`").label(span, "this `if` has its `else` already");
                self.errors.push(e.help("remove one of them"));
                continue;
            }
            let mut comments = stmt.trivia.before;
            match (&trivia.after, stmt.trivia.after) {
                (None, after) => trivia.after = after,
                (Some(_), after) => comments.extend(after),
            }
            for (cond, mut block) in branch.branches {
                comments.append(&mut block.tail);
                block.tail = std::mem::take(&mut comments);
                first.branches.push((cond, block));
            }
            if let Some(mut block) = branch.otherwise {
                comments.append(&mut block.tail);
                block.tail = comments;
                first.otherwise = Some(block);
            }
        }
    }

    fn first_word(&self, head: &Range<usize>) -> &str {
        let text = self.lines.text[head.clone()].trim_start_matches('\u{FEFF}').trim_start();
        let text = text.strip_prefix("@op").map_or(text, str::trim_start);
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        &text[..end]
    }

    /// The statements of one piece: more than one if a `;` was missing between them.
    fn piece(&mut self, piece: Piece, place: StmtContext) -> Vec<Stmt> {
        let Piece { mut trivia, mut head, end } = piece;
        let mut stmts = vec![];
        let bad_text = |e: &Diagnostic| {
            let (first, last) = (self.lines.span(head.start..head.start), self.lines.span(head.end..head.end));
            e.code == "E0107"
                && e.labels.iter().any(|l| (first.line, first.col) <= (l.span.line, l.span.col) && (l.span.line, l.span.col) <= (last.line, last.col))
        };
        if self.errors.iter().any(bad_text) {
            if let End::Block(pieces) = end {
                let inner = self.inner_place(&head, place);
                self.block(pieces, inner);
            }
            return vec![self.bad(head, trivia)];
        }
        let brackets = check_brackets(self.lines, head.clone());
        if !brackets.is_empty() {
            self.errors.extend(brackets);
            if let End::Block(pieces) = end {
                let inner = self.inner_place(&head, place);
                self.block(pieces, inner);
            }
            return vec![self.bad(head, trivia)];
        }
        if head.len() > MAX_STATEMENT {
            let e = Diagnostic::error("E0105", format!("a statement of more than {MAX_STATEMENT} bytes"));
            self.errors.push(e.label(self.lines.span(head.start..head.start + 1), "begins here").help("split it, or look for a missing `;`"));
            return vec![self.bad(head, trivia)];
        }
        if let Some(n) = self.lines.text[head.clone()].find(repair::HOLE) {
            let e = Diagnostic::error("E0101", "an unexpected control character");
            self.errors.push(e.label(self.lines.span(head.start + n..head.start + n + 1), "here").help("remove it"));
            return vec![self.bad(head, trivia)];
        }
        let missing = matches!(end, End::Missing);
        let mut body = match end {
            End::Block(pieces) => Some(pieces),
            End::Semicolon | End::Missing => None,
        };
        // The statement without its mistakes so far, and the end of the last one.
        let (mut repaired, mut sound): (Option<String>, usize) = (None, head.start);
        let before = self.errors.len();
        loop {
            let rule = match self.rule(&head, place, body.is_some()) {
                Ok(rule) => rule,
                Err(error) => {
                    self.errors.push(*error);
                    if let Some(pieces) = body.take() {
                        let inner = self.inner_place(&head, place);
                        self.block(pieces, inner);
                    }
                    stmts.push(self.bad(head, trivia));
                    return stmts;
                }
            };
            let whole = &self.lines.text[head.clone()];
            let text = repaired.as_deref().unwrap_or(whole);
            match MdlParser::parse(rule, text) {
                Ok(mut pairs) => {
                    let pair = pairs.next().expect("invariant: a rule yields one pair");
                    let kind = self.build(rule, pair, head.start, body.take());
                    if missing {
                        self.missing_semicolon(&head);
                    }
                    stmts.push(Stmt { kind, span: self.lines.span(head), trivia });
                    return stmts;
                }
                Err(error) => {
                    let at = head.start + location(&error);
                    if let Some(first) = self.statement_before(&head, at, place) {
                        self.missing_semicolon(&(head.start..at));
                        stmts.push(Stmt { kind: first, span: self.lines.span(head.start..at), trivia: std::mem::take(&mut trivia) });
                        head.start = at;
                        repaired = None;
                        continue;
                    }
                    // An error before the end of the last mistake may only come from its removal.
                    if at >= sound {
                        let shown = self.syntax_error(&error, at, &head, place);
                        self.errors.push(shown);
                        let more = self.errors.len() - before < MAX_MISTAKES && matches!(error.variant, ErrorVariant::ParsingError { .. });
                        let part = repair::part(text, at - head.start).filter(|p| more && head.start + p.start >= sound);
                        if let Some(part) = part {
                            sound = head.start + part.end + 1;
                            repaired = Some(repair::without(text, &part));
                            continue;
                        }
                    }
                    if let Some(pieces) = body.take() {
                        let inner = self.inner_place(&head, place);
                        self.block(pieces, inner);
                    }
                    stmts.push(self.bad(head, trivia));
                    return stmts;
                }
            }
        }
    }

    fn missing_semicolon(&mut self, head: &Range<usize>) {
        let end = head.start + self.code_end(head);
        let e = Diagnostic::error("E0102", "a `;` is missing after this statement").label(self.lines.span(end..end + 1), "expected `;`");
        let comment = self.lines.text[end..head.end].trim_start();
        self.errors.push(match comment.starts_with("//") && comment.trim_end().ends_with(';') {
            true => e.help("`//` begins a comment; of static numbers `/` is exact, and `floor(a / b)` rounds down"),
            false => e.help("every statement without a block ends with `;`"),
        });
    }

    /// Length of a statement without a comment on its last line.
    fn code_end(&self, head: &Range<usize>) -> usize {
        let text = self.lines.text[head.clone()].trim_end();
        let last = text.rfind('\n').map_or(0, |n| n + 1);
        match text[last..].find("//") {
            Some(n) => text[..last + n].trim_end().len(),
            None => text.len(),
        }
    }

    /// The statement that ends before `at`, if what is there begins a line and what is before it parses.
    fn statement_before(&mut self, head: &Range<usize>, at: usize, place: StmtContext) -> Option<StmtKind> {
        if at <= head.start || !self.lines.is_first(at) || at >= self.lines.text.len() {
            return None;
        }
        let first = head.start..at;
        let rule = self.rule(&first, place, false).ok()?;
        let pair = MdlParser::parse(rule, self.lines.text[first].trim_end()).ok()?.next()?;
        Some(self.build(rule, pair, head.start, None))
    }

    /// The rule that a statement must match, by its first word.
    fn rule(&self, head: &Range<usize>, place: StmtContext, has_block: bool) -> Result<Rule, Box<Diagnostic>> {
        let word = self.first_word(head);
        let text = &self.lines.text[head.clone()];
        let start = head.start + (text.len() - text.trim_start_matches('\u{FEFF}').trim_start().len());
        let span = self.lines.span(start..start + word.len().max(1).min(head.end.saturating_sub(start)));
        let rule = match (place, word) {
            (StmtContext::File | StmtContext::Block, "fn") if has_block => Rule::fn_line,
            (StmtContext::File | StmtContext::Block, "fn") => Rule::fn_short_line,
            (StmtContext::File, "import") => Rule::import_line,
            (StmtContext::File, "model") => Rule::model_line,
            (StmtContext::File, "train") => Rule::train_line,
            (StmtContext::File, "plan") => Rule::plan_line,
            (StmtContext::File, "weights") => Rule::weights_line,
            (StmtContext::File, word) if StmtContext::Block.words().contains(&word) => {
                let e = Diagnostic::error("E0109", format!("`{word}` stands outside of a model")).label(span, "belongs into a block");
                return Err(Box::new(e.help("put it inside `model name(batch, ..) { .. }`; look for a `}` too many above")));
            }
            (StmtContext::File, _) => {
                let e = Diagnostic::error("E0101", "expected a model, a function or a section").label(span, "none begins like this");
                return Err(Box::new(suggest(e, word, place).help("a file has `import`, `fn`, `model`, `train`, `plan` and `weights`")));
            }
            (StmtContext::Block, "dim") => Rule::dim_line,
            (StmtContext::Block, "let") => Rule::let_line,
            (StmtContext::Block, "input") => Rule::input_line,
            (StmtContext::Block, "param") => Rule::param_line,
            (StmtContext::Block, "state") => Rule::state_line,
            (StmtContext::Block, "update") => Rule::update_line,
            (StmtContext::Block, "if") => Rule::if_line,
            (StmtContext::Block, "else") => {
                let rest = text.trim_start().trim_start_matches("else").trim_start();
                if rest.starts_with("if") { Rule::else_if_line } else { Rule::else_line }
            }
            (StmtContext::Block, "repeat") => Rule::repeat_line,
            (StmtContext::Block, "return") => Rule::return_line,
            (StmtContext::Block, "loss") => Rule::loss_line,
            (StmtContext::Block, "metric") => Rule::metric_line,
            (StmtContext::Block, "output") => Rule::output_line,
            (StmtContext::Block, "generate") => Rule::generate_line,
            (StmtContext::Block, _) => {
                let after = text.trim_start().trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.').trim_start();
                if after.starts_with('(') { Rule::call_line } else { Rule::assign_line }
            }
            (StmtContext::Settings, "group") if has_block => Rule::group_line,
            (StmtContext::Settings, _) => Rule::setting_line,
            (StmtContext::Weights, _) => Rule::weight_line,
        };
        match (takes_block(rule), has_block) {
            (true, false) => {
                let at = head.start + self.code_end(head);
                let e = Diagnostic::error("E0101", format!("`{word}` needs a block")).label(self.lines.span(at..at + 1), "expected `{`");
                Err(Box::new(e.label(span, "begins here")))
            }
            (false, true) => {
                let at = head.end;
                let e = Diagnostic::error("E0101", "an unexpected `{`").label(span, "this statement takes no block");
                Err(Box::new(suggest(e, word, place).label(self.lines.span(at..at + 1), "near this `{`")))
            }
            (true, true) | (false, false) => Ok(rule),
        }
    }

    fn build(&mut self, rule: Rule, pair: Pair<'_, Rule>, base: usize, body: Option<Pieces>) -> StmtKind {
        let inner = match rule {
            Rule::train_line | Rule::plan_line | Rule::group_line => StmtContext::Settings,
            Rule::weights_line => StmtContext::Weights,
            _ => StmtContext::Block,
        };
        let block = body.map(|pieces| self.block(pieces, inner));
        let builder = Builder { lines: self.lines, base, errors: vec![].into() };
        let kind = match (rule, block) {
            (Rule::fn_line, block @ Some(_)) => StmtKind::Fn(Rc::new(builder.function(pair, block))),
            (Rule::fn_short_line, _) => StmtKind::Fn(Rc::new(builder.function(pair, None))),
            (Rule::model_line, Some(block)) => StmtKind::Model(Rc::new(builder.model(pair, block))),
            (Rule::train_line, Some(block)) => StmtKind::Train(block),
            (Rule::plan_line, Some(block)) => StmtKind::Plan(block),
            (Rule::weights_line, Some(block)) => StmtKind::Weights { name: builder.weights_name(pair), block },
            (Rule::group_line, Some(block)) => StmtKind::Group { patterns: builder.patterns(pair), block },
            (Rule::if_line | Rule::else_if_line, Some(then)) => StmtKind::If(If { branches: vec![(builder.condition(pair), then)], otherwise: None }),
            (Rule::else_line, otherwise) => StmtKind::If(If { branches: vec![], otherwise }),
            (Rule::repeat_line, Some(block)) => StmtKind::Repeat(builder.repeat(pair, block)),
            (rule, _) => builder.simple(rule, pair),
        };
        self.errors.append(&mut builder.errors.into_inner());
        kind
    }

    fn inner_place(&self, head: &Range<usize>, place: StmtContext) -> StmtContext {
        match (place, self.first_word(head)) {
            (StmtContext::File, "train" | "plan") | (StmtContext::Settings, _) => StmtContext::Settings,
            (StmtContext::File, "weights") | (StmtContext::Weights, _) => StmtContext::Weights,
            (StmtContext::File | StmtContext::Block, _) => StmtContext::Block,
        }
    }

    /// A statement that did not parse, with the names it would have declared.
    fn bad(&self, head: Range<usize>, trivia: Trivia) -> Stmt {
        let text = &self.lines.text[head.clone()];
        let mut names: Vec<Ident> = repair::names(text)
            .into_iter()
            .map(|r| Ident { name: text[r.clone()].into(), span: self.lines.span(head.start + r.start..head.start + r.end) })
            .collect();
        if !is_keyword(self.first_word(&head)) {
            // The first word may be a misspelt keyword, as in `lett x = ..`.
            let words = text.split(['=', ':']).next().unwrap_or("").split_whitespace();
            names.extend(words.skip(1).map(|w| Ident { name: w.trim_matches(',').into(), span: self.lines.span(head.clone()) }));
        }
        Stmt { kind: StmtKind::Bad(names), span: self.lines.span(head), trivia }
    }

    fn syntax_error(&self, error: &pest::error::Error<Rule>, at: usize, head: &Range<usize>, place: StmtContext) -> Diagnostic {
        let rest = &self.lines.text[at..head.end];
        let word_end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let len = if word_end > 0 { word_end } else { rest.chars().next().map_or(0, char::len_utf8) };
        let found = &rest[..len];
        let span = if len > 0 { self.lines.span(at..at + len) } else { self.end_span(head) };
        let expected = match &error.variant {
            ErrorVariant::ParsingError { positives, .. } => {
                let mut words: Vec<&str> = positives.iter().flat_map(|r| describe(*r)).copied().collect();
                words.sort_unstable();
                words.dedup();
                words
            }
            ErrorVariant::CustomError { .. } => {
                let e = Diagnostic::error("E0105", "this statement is too large to parse").label(span, "stopped here");
                return e.help("split it with `let`");
            }
        };
        let message = match found {
            "" => "this statement is not complete".to_string(),
            _ => format!("unexpected `{found}`"),
        };
        let label = match expected.split_last() {
            Some((last, [])) => format!("expected {last}"),
            Some((last, others)) => format!("expected {} or {last}", others.join(", ")),
            None => "not expected here".to_string(),
        };
        let mut e = Diagnostic::error("E0101", message).label(span, label);
        if expected.contains(&"a name") && StmtContext::Block.words().iter().chain(&["in", "as", "or", "and", "not", "else"]).any(|w| *w == found) {
            e = e.note(format!("`{found}` is a reserved word"));
        }
        match foreign::spelling(&self.lines.text[head.clone()], at - head.start) {
            Some(way) => e.help(way),
            None => suggest(e, self.first_word(head), place),
        }
    }

    fn end_span(&self, head: &Range<usize>) -> Span {
        let end = head.start + self.code_end(head);
        self.lines.span(end..end + 1)
    }
}

/// Whether a statement of some place, or a branch, begins with the word.
fn is_keyword(word: &str) -> bool {
    word == "else" || [StmtContext::File, StmtContext::Block, StmtContext::Settings, StmtContext::Weights].iter().any(|p| p.words().contains(&word))
}

/// Offers the keyword that a statement's first word may have been meant as.
fn suggest(e: Diagnostic, word: &str, place: StmtContext) -> Diagnostic {
    if let Some(way) = foreign::keyword(word) {
        return e.help(way);
    }
    let words = place.words();
    match nearest(word, words.iter().copied()) {
        Some(near) if near != word => e.help(format!("did you mean `{near}`?")),
        _ => e,
    }
}

fn location(error: &pest::error::Error<Rule>) -> usize {
    match error.location {
        InputLocation::Pos(at) | InputLocation::Span((at, _)) => at,
    }
}

fn takes_block(rule: Rule) -> bool {
    matches!(
        rule,
        Rule::fn_line
            | Rule::model_line
            | Rule::if_line
            | Rule::else_if_line
            | Rule::else_line
            | Rule::repeat_line
            | Rule::train_line
            | Rule::plan_line
            | Rule::weights_line
            | Rule::group_line
    )
}

/// What a rule that pest hoped for looks like to a user.
fn describe(rule: Rule) -> &'static [&'static str] {
    match rule {
        Rule::id | Rule::names | Rule::path | Rule::dim_item | Rule::counter | Rule::label | Rule::arg_name | Rule::header => &["a name"],
        Rule::number
        | Rule::expr
        | Rule::exprs
        | Rule::operand
        | Rule::call
        | Rule::paren
        | Rule::list
        | Rule::constant
        | Rule::arg
        | Rule::neg
        | Rule::not
        | Rule::element => &["a value"],
        Rule::text => &["a text in quotes"],
        Rule::initial => &["`=`"],
        Rule::drawn => &["`~`"],
        Rule::type_mark | Rule::tensor_mark => &["`:` and a type"],
        Rule::kind | Rule::tensor | Rule::dtype | Rule::word => &["a type"],
        Rule::type_dim | Rule::rest => &["a dim"],
        Rule::headers => &["`(`"],
        Rule::results => &["`->`"],
        Rule::index => &["`[`"],
        Rule::or
        | Rule::and
        | Rule::eq
        | Rule::ne
        | Rule::le
        | Rule::ge
        | Rule::lt
        | Rule::gt
        | Rule::add
        | Rule::sub
        | Rule::mul
        | Rule::div
        | Rule::rem
        | Rule::pow => &["an operator"],
        Rule::k_as => &["`as`"],
        Rule::k_in => &["`in`"],
        Rule::k_fn => &["`fn`"],
        Rule::attribute => &["`@`"],
        Rule::EOI => &["`;`"],
        _ => &[],
    }
}
