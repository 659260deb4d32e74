//! From pest's pairs to the tree. A pair's children come in the order of its rule in `grammar.pest`.

use crate::ast::*;
use crate::split::Lines;
use ir::diag::{Diagnostic, Span};
use pest::iterators::{Pair, Pairs};
use pest::pratt_parser::{Assoc, Op, PrattParser};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::LazyLock;

#[derive(pest_derive::Parser)]
#[grammar = "grammar.pest"]
pub struct MdlParser;

/// The most nodes on a path of an expression, and operators side by side.
const MAX_DEPTH: usize = 200;

static PRATT: LazyLock<PrattParser<Rule>> = LazyLock::new(|| {
    let left = |rule| Op::infix(rule, Assoc::Left);
    PrattParser::new()
        .op(left(Rule::or))
        .op(left(Rule::and))
        .op(Op::prefix(Rule::not))
        .op(left(Rule::eq) | left(Rule::ne) | left(Rule::lt) | left(Rule::le) | left(Rule::gt) | left(Rule::ge))
        .op(left(Rule::add) | left(Rule::sub))
        .op(left(Rule::mul) | left(Rule::div) | left(Rule::rem))
        .op(Op::prefix(Rule::neg))
        .op(Op::infix(Rule::pow, Assoc::Right))
});

/// Turns the pairs of one statement into a tree; `base` is the statement's offset in the file.
pub struct Builder<'l, 't> {
    pub lines: &'l Lines<'t>,
    pub base: usize,
    pub errors: RefCell<Vec<Diagnostic>>,
}

/// Children of a pair, taken one by one by rule.
struct Children<'p>(std::iter::Peekable<Pairs<'p, Rule>>);

impl<'p> Children<'p> {
    fn of(pair: Pair<'p, Rule>) -> Self {
        Children(pair.into_inner().peekable())
    }

    fn maybe(&mut self, rule: Rule) -> Option<Pair<'p, Rule>> {
        self.0.next_if(|p| p.as_rule() == rule)
    }

    fn expect(&mut self, rule: Rule) -> Pair<'p, Rule> {
        self.maybe(rule).expect("invariant: the grammar puts this rule here")
    }

    fn all(&mut self, rule: Rule) -> Vec<Pair<'p, Rule>> {
        std::iter::from_fn(|| self.maybe(rule)).collect()
    }
}

impl Builder<'_, '_> {
    pub fn span(&self, pair: &Pair<'_, Rule>) -> Span {
        let span = pair.as_span();
        let len = pair.as_str().trim_end().len();
        self.lines.span(self.base + span.start()..self.base + span.start() + len)
    }

    fn error(&self, error: Diagnostic) {
        self.errors.borrow_mut().push(error);
    }

    fn ident(&self, pair: &Pair<'_, Rule>) -> Ident {
        Ident { name: pair.as_str().into(), span: self.span(pair) }
    }

    fn text(&self, pair: &Pair<'_, Rule>) -> Text {
        Text { text: pair.as_str().trim_matches('"').into(), span: self.span(pair) }
    }

    fn inner_ident(&self, pair: Pair<'_, Rule>) -> Ident {
        self.ident(&Children::of(pair).expect(Rule::id))
    }

    fn names(&self, pair: Pair<'_, Rule>) -> Vec<Ident> {
        pair.into_inner().map(|p| self.ident(&p)).collect()
    }

    fn path(&self, pair: Pair<'_, Rule>) -> Path {
        Path { parts: self.names(pair) }
    }

    /// The expression inside a rule like `"=" ~ expr`.
    fn inner_expr(&self, pair: Pair<'_, Rule>) -> Expr {
        self.expr(Children::of(pair).expect(Rule::expr))
    }

    fn exprs(&self, pair: Pair<'_, Rule>) -> Vec<Expr> {
        pair.into_inner().map(|p| self.expr(p)).collect()
    }

    pub fn expr(&self, pair: Pair<'_, Rule>) -> Expr {
        let span = self.span(&pair);
        let operators = pair.clone().into_inner().filter(|p| p.as_rule() != Rule::operand).count();
        if operators > MAX_DEPTH {
            return self.too_deep(span);
        }
        PRATT
            .map_primary(|p| self.operand(p))
            .map_prefix(|op, arg| {
                let start = self.span(&op);
                let kind = if op.as_rule() == Rule::not { UnaryOp::Not } else { UnaryOp::Neg };
                self.node(join(start, arg.span), arg.depth, ExprKind::Unary { op: kind, arg: Box::new(arg) })
            })
            .map_infix(|left, op, right| self.binary(left, &op, right))
            .parse(pair.into_inner())
    }

    fn binary(&self, left: Expr, pair: &Pair<'_, Rule>, right: Expr) -> Expr {
        let op = match pair.as_rule() {
            Rule::or => BinaryOp::Or,
            Rule::and => BinaryOp::And,
            Rule::eq => BinaryOp::Eq,
            Rule::ne => BinaryOp::Ne,
            Rule::lt => BinaryOp::Lt,
            Rule::le => BinaryOp::Le,
            Rule::gt => BinaryOp::Gt,
            Rule::ge => BinaryOp::Ge,
            Rule::add => BinaryOp::Add,
            Rule::sub => BinaryOp::Sub,
            Rule::mul => BinaryOp::Mul,
            Rule::div => BinaryOp::Div,
            Rule::rem => BinaryOp::Rem,
            _ => BinaryOp::Pow,
        };
        let op_span = self.span(pair);
        if op.is_comparison() && matches!(&left.kind, ExprKind::Binary { op: inner, .. } if inner.is_comparison()) {
            let e = Diagnostic::error("E0110", "comparisons do not chain").label(op_span, "a second comparison");
            self.error(e.help("write `a < b and b < c`"));
            return Expr { kind: ExprKind::Bad, span: join(left.span, right.span), depth: 1 };
        }
        let depth = left.depth.max(right.depth);
        let span = join(left.span, right.span);
        self.node(span, depth, ExprKind::Binary { op, op_span, left: Box::new(left), right: Box::new(right) })
    }

    /// A node over children of at most the given depth.
    fn node(&self, span: Span, below: u16, kind: ExprKind) -> Expr {
        if usize::from(below) >= MAX_DEPTH {
            return self.too_deep(span);
        }
        Expr { kind, span, depth: below + 1 }
    }

    fn too_deep(&self, span: Span) -> Expr {
        let e = Diagnostic::error("E0105", format!("this expression has more than {MAX_DEPTH} operators inside each other"));
        self.error(e.label(span, "too large").help("name parts of it with `let`"));
        Expr { kind: ExprKind::Bad, span, depth: 1 }
    }

    fn operand(&self, pair: Pair<'_, Rule>) -> Expr {
        let mut inner = pair.into_inner();
        let first = inner.next().expect("invariant: an operand begins with a primary");
        let mut base = self.primary(first);
        for index in inner {
            let span = join(base.span, self.span(&index));
            let items: Vec<(Ident, Expr)> = index
                .into_inner()
                .map(|item| {
                    let mut parts = Children::of(item);
                    (self.ident(&parts.expect(Rule::id)), self.expr(parts.expect(Rule::expr)))
                })
                .collect();
            let depth = items.iter().map(|(_, e)| e.depth).fold(base.depth, u16::max);
            base = self.node(span, depth, ExprKind::Index { base: Box::new(base), items });
        }
        base
    }

    fn primary(&self, pair: Pair<'_, Rule>) -> Expr {
        let span = self.span(&pair);
        let leaf = |kind| Expr { kind, span, depth: 1 };
        match pair.as_rule() {
            Rule::number => leaf(self.number(pair.as_str(), span)),
            Rule::text => leaf(ExprKind::Text(self.text(&pair).text)),
            Rule::constant => leaf(match pair.as_str().trim() {
                "true" => ExprKind::Bool(true),
                "false" => ExprKind::Bool(false),
                _ => ExprKind::None,
            }),
            Rule::paren => {
                let inner = self.inner_expr(pair);
                self.node(span, inner.depth, ExprKind::Paren(Box::new(inner)))
            }
            Rule::list => {
                let elements: Vec<Element> = pair.into_inner().map(|p| self.element(p)).collect();
                let depth = elements.iter().map(|e| e.expr.depth).max().unwrap_or(0);
                self.node(span, depth, ExprKind::List(elements))
            }
            Rule::call => self.call(pair),
            // An error was reported for the hole already.
            Rule::hole => leaf(ExprKind::Bad),
            _ => leaf(ExprKind::Name(pair.as_str().into())),
        }
    }

    fn element(&self, pair: Pair<'_, Rule>) -> Element {
        let mut parts = Children::of(pair);
        Element { expr: self.expr(parts.expect(Rule::expr)), spread: parts.maybe(Rule::spread).is_some() }
    }

    fn call(&self, pair: Pair<'_, Rule>) -> Expr {
        let span = self.span(&pair);
        let mut parts = Children::of(pair);
        let path = self.path(parts.expect(Rule::path));
        let args: Vec<Arg> = parts.all(Rule::arg).into_iter().map(|p| self.arg(p)).collect();
        let alias = parts.maybe(Rule::k_as).map(|_| self.ident(&parts.expect(Rule::id)));
        let depth = args.iter().map(|a| a.value.depth.max(a.to.as_ref().map_or(0, |e| e.depth))).max().unwrap_or(0);
        self.node(span, depth, ExprKind::Call(Call { path, args, alias }))
    }

    fn arg(&self, pair: Pair<'_, Rule>) -> Arg {
        let mut parts = Children::of(pair);
        let name = parts.maybe(Rule::arg_name).map(|p| self.inner_ident(p));
        let value = self.expr(parts.expect(Rule::expr));
        Arg { name, value, to: parts.maybe(Rule::expr).map(|p| self.expr(p)) }
    }

    fn number(&self, text: &str, span: Span) -> ExprKind {
        let spelling: Rc<str> = text.into();
        match number(text) {
            Ok(Number::Int(n)) => ExprKind::Int(n, spelling),
            Ok(Number::Real(x)) => ExprKind::Real(x, spelling),
            Err(error) => {
                self.error(error.label(span, "this number"));
                ExprKind::Bad
            }
        }
    }

    fn type_expr(&self, pair: Pair<'_, Rule>) -> TypeExpr {
        let span = self.span(&pair);
        let mut parts = Children::of(pair);
        let dtype = parts.maybe(Rule::dtype).map(|p| self.ident(&p));
        let dims = parts.all(Rule::type_dim).into_iter().map(|p| {
            let mut inner = Children::of(p);
            match inner.maybe(Rule::element) {
                Some(element) => TypeDim::Element(self.element(element)),
                None => TypeDim::Rest,
            }
        });
        TypeExpr { dtype, dims: dims.collect(), span }
    }

    fn tensor_mark(&self, pair: Pair<'_, Rule>) -> TypeExpr {
        self.type_expr(Children::of(pair).expect(Rule::tensor))
    }

    fn kind(&self, mark: Pair<'_, Rule>) -> Option<ParamKind> {
        let kind = Children::of(mark).expect(Rule::kind);
        let mut parts = Children::of(kind);
        if let Some(tensor) = parts.maybe(Rule::tensor) {
            return Some(ParamKind::Type(self.type_expr(tensor)));
        }
        let word = parts.expect(Rule::word);
        Some(match word.as_str() {
            "int" => ParamKind::Int,
            "real" => ParamKind::Real,
            "bool" => ParamKind::Bool,
            "text" => ParamKind::Text,
            "reals" => ParamKind::Reals,
            "dim" => ParamKind::Dim,
            "dims" => ParamKind::Dims,
            other => {
                let e = Diagnostic::error("E0401", format!("no kind of value is called `{other}`")).label(self.span(&word), "unknown");
                self.error(e.help("int, real, bool, text, reals, dim, dims, or a tensor type such as [.., hidden] or i32[batch, seq]"));
                return None;
            }
        })
    }

    fn headers(&self, pair: Pair<'_, Rule>) -> Vec<Header> {
        let header = |p| {
            let mut parts = Children::of(p);
            let name = self.ident(&parts.expect(Rule::id));
            let kind = parts.maybe(Rule::type_mark).and_then(|p| self.kind(p));
            Header { name, kind, default: parts.maybe(Rule::initial).map(|p| self.inner_expr(p)) }
        };
        pair.into_inner().map(header).collect()
    }

    /// The function of an `fn_line` or `fn_short_line`. The body of the former is given.
    pub fn function(&self, pair: Pair<'_, Rule>, block: Option<Block>) -> Function {
        let mut parts = Children::of(pair);
        let op = parts.maybe(Rule::at_op).is_some();
        parts.expect(Rule::k_fn);
        let name = self.ident(&parts.expect(Rule::id));
        let params = self.headers(parts.expect(Rule::headers));
        let results = match parts.maybe(Rule::results) {
            Some(results) => results.into_inner().map(|p| self.type_expr(p)).collect(),
            None => vec![],
        };
        let body = match block {
            Some(block) => Body::Block(block),
            None => Body::Short(self.inner_expr(parts.expect(Rule::initial))),
        };
        Function { op, name, params, results, body }
    }

    pub fn model(&self, pair: Pair<'_, Rule>, body: Block) -> Model {
        let mut parts = Children::of(pair);
        parts.expect(Rule::k_model);
        let name = self.ident(&parts.expect(Rule::id));
        Model { name, settings: self.headers(parts.expect(Rule::headers)), body }
    }

    /// The condition of an `if_line` or `else_if_line`.
    pub fn condition(&self, pair: Pair<'_, Rule>) -> Expr {
        let mut parts = Children::of(pair);
        parts.maybe(Rule::k_else);
        parts.expect(Rule::k_if);
        self.expr(parts.expect(Rule::expr))
    }

    pub fn repeat(&self, pair: Pair<'_, Rule>, body: Block) -> Repeat {
        let mut parts = Children::of(pair);
        parts.expect(Rule::k_repeat);
        let counter = parts.maybe(Rule::counter).map(|p| self.inner_ident(p));
        parts.maybe(Rule::k_in);
        let count = self.ident(&parts.expect(Rule::id));
        let alias = parts.maybe(Rule::k_as).map(|_| self.ident(&parts.expect(Rule::id)));
        Repeat { counter, count, alias, body }
    }

    pub fn patterns(&self, pair: Pair<'_, Rule>) -> Vec<Text> {
        let mut parts = Children::of(pair);
        parts.expect(Rule::k_group);
        parts.all(Rule::text).iter().map(|p| self.text(p)).collect()
    }

    pub fn weights_name(&self, pair: Pair<'_, Rule>) -> Ident {
        let mut parts = Children::of(pair);
        parts.expect(Rule::k_weights);
        self.ident(&parts.expect(Rule::id))
    }

    /// The statement of a line that has no block, except functions.
    pub fn simple(&self, rule: Rule, pair: Pair<'_, Rule>) -> StmtKind {
        let mut parts = Children::of(pair);
        match rule {
            Rule::import_line => {
                parts.expect(Rule::k_import);
                let path = self.text(&parts.expect(Rule::text));
                StmtKind::Import { path, alias: parts.maybe(Rule::k_as).map(|_| self.ident(&parts.expect(Rule::id))) }
            }
            Rule::dim_line => {
                parts.expect(Rule::k_dim);
                let item = |p| {
                    let mut inner = Children::of(p);
                    (self.ident(&inner.expect(Rule::id)), inner.maybe(Rule::initial).map(|p| self.inner_expr(p)))
                };
                StmtKind::Dim(parts.all(Rule::dim_item).into_iter().map(item).collect())
            }
            Rule::let_line => {
                parts.expect(Rule::k_let);
                StmtKind::Let { names: self.names(parts.expect(Rule::names)), value: self.inner_expr(parts.expect(Rule::initial)) }
            }
            Rule::assign_line => {
                StmtKind::Assign { names: self.names(parts.expect(Rule::names)), value: self.inner_expr(parts.expect(Rule::initial)) }
            }
            Rule::input_line => {
                parts.expect(Rule::k_input);
                let names = self.names(parts.expect(Rule::names));
                let ty = self.tensor_mark(parts.expect(Rule::tensor_mark));
                let value = parts.maybe(Rule::initial).map(|p| self.inner_expr(p));
                StmtKind::Input { names, ty, value, attributes: self.attributes(&mut parts) }
            }
            Rule::param_line => {
                parts.expect(Rule::k_param);
                StmtKind::Param(self.storage(parts))
            }
            Rule::state_line => {
                parts.expect(Rule::k_state);
                StmtKind::State(self.storage(parts))
            }
            Rule::update_line => {
                parts.expect(Rule::k_update);
                StmtKind::Update { name: self.ident(&parts.expect(Rule::id)), value: self.inner_expr(parts.expect(Rule::initial)) }
            }
            Rule::return_line => {
                parts.expect(Rule::k_return);
                StmtKind::Return(self.exprs(parts.expect(Rule::exprs)))
            }
            Rule::loss_line => {
                parts.expect(Rule::k_loss);
                let name = parts.maybe(Rule::label).map(|p| self.inner_ident(p));
                StmtKind::Loss { name, value: self.expr(parts.expect(Rule::expr)) }
            }
            Rule::metric_line => {
                parts.expect(Rule::k_metric);
                StmtKind::Metric { name: self.ident(&parts.expect(Rule::id)), value: self.inner_expr(parts.expect(Rule::initial)) }
            }
            Rule::output_line => {
                parts.expect(Rule::k_output);
                StmtKind::Output(self.names(parts.expect(Rule::names)))
            }
            Rule::generate_line => {
                parts.expect(Rule::k_generate);
                StmtKind::Generate { name: self.ident(&parts.expect(Rule::id)), call: self.call(parts.expect(Rule::call)) }
            }
            Rule::setting_line => {
                let path = self.path(parts.expect(Rule::path));
                StmtKind::Setting { path, tiers: parts.all(Rule::exprs).into_iter().map(|p| self.exprs(p)).collect() }
            }
            Rule::weight_line => {
                let paths = parts.all(Rule::path).into_iter().map(|p| self.path(p)).collect();
                let template = self.text(&parts.expect(Rule::text));
                let copies = parts.all(Rule::text).iter().map(|p| self.text(p)).collect();
                let layout = parts.maybe(Rule::layout).map(|p| p.into_inner().map(|p| self.product(p)).collect());
                StmtKind::Weight { paths, template, copies, layout }
            }
            _ => StmtKind::Call(self.call(parts.expect(Rule::call))),
        }
    }

    fn storage(&self, mut parts: Children<'_>) -> Storage {
        let names = self.names(parts.expect(Rule::names));
        let ty = self.tensor_mark(parts.expect(Rule::tensor_mark));
        let init = match parts.maybe(Rule::drawn) {
            Some(drawn) => Init::Drawn(self.inner_expr(drawn)),
            None => Init::Value(self.inner_expr(parts.expect(Rule::initial))),
        };
        let attributes = self.attributes(&mut parts);
        Storage { names, ty, init, attributes }
    }

    fn attributes(&self, parts: &mut Children<'_>) -> Vec<Ident> {
        parts.all(Rule::attribute).into_iter().map(|p| self.inner_ident(p)).collect()
    }

    fn product(&self, pair: Pair<'_, Rule>) -> Product {
        let atom = |p| {
            let mut parts = Children::of(p);
            match parts.maybe(Rule::choice) {
                Some(choice) => Atom::Choice(choice.into_inner().map(|p| self.product(p)).collect()),
                None => Atom::Dim(self.ident(&parts.expect(Rule::id))),
            }
        };
        Product { atoms: pair.into_inner().map(atom).collect() }
    }
}

pub enum Number {
    Int(i64),
    Real(f64),
}

/// Reads `50_304`, `1e-5`, `0.02`. Errors say what is wrong but not where.
pub fn number(text: &str) -> Result<Number, Box<Diagnostic>> {
    let plain = text.replace('_', "");
    let bad = || {
        let e = Diagnostic::error("E0106", format!("`{text}` is not a number"));
        Box::new(e.help("an integer such as 50_304, or a real such as 0.02 or 1e-5"))
    };
    if plain.bytes().all(|b| b.is_ascii_digit()) {
        return plain.parse().map(Number::Int).map_err(|_| {
            let e = Diagnostic::error("E0302", format!("`{text}` is larger than the largest integer, {}", i64::MAX));
            Box::new(e.help("write it as a real, such as 1e20"))
        });
    }
    let shaped = plain.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    let digits_around = !plain.ends_with('.') && !plain.contains(".e") && !plain.contains(".E");
    match plain.parse::<f64>() {
        Ok(x) if shaped && digits_around && x.is_finite() => Ok(Number::Real(x)),
        Ok(_) if shaped && digits_around => {
            let e = Diagnostic::error("E0302", format!("`{text}` is larger than the largest real, 1.8e308"));
            Err(Box::new(e.help("write `inf` for infinity")))
        }
        _ => Err(bad()),
    }
}

/// From the beginning of one span to the end of another, or to the end of the first line of it.
pub fn join(a: Span, b: Span) -> Span {
    if a.line == b.line { Span { len: (b.col + b.len).saturating_sub(a.col), ..a } } else { a }
}
