//! The tree of an .mdl text, as written: nothing is resolved, numbers keep their spelling, parentheses and comments
//! are kept, so that the formatter prints from it.

use ir::diag::Span;
use std::rc::Rc;

/// A parsed file: its top-level items in order.
#[derive(Clone, Debug)]
pub struct Ast {
    /// Number of the file in the `Sources`.
    pub file: u16,
    /// Imports, functions, models and sections, in the order of the text.
    pub items: Vec<Stmt>,
    /// Comments after the last item.
    pub tail: Vec<String>,
}

/// A name of the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ident {
    /// Letters, digits and `_`, without what stands around it.
    pub name: Rc<str>,
    /// Where it stands; perhaps all of a statement that did not parse.
    pub span: Span,
}

/// A statement, item or setting with the comments that belong to it.
#[derive(Clone, Debug)]
pub struct Stmt {
    /// The statement itself, with all that is inside of it.
    pub kind: StmtKind,
    /// Its text up to its `;` or first `{`, without these.
    pub span: Span,
    /// Comments and blank lines around it.
    pub trivia: Trivia,
}

/// Comments, with their `//`, and blank lines around a statement.
#[derive(Clone, Debug, Default)]
pub struct Trivia {
    /// Whether an empty line is before it and its comments; false for the first of a block.
    pub blank_before: bool,
    /// Comments before the statement or within it; `""` is an empty line.
    pub before: Vec<String>,
    /// The comment behind its `;` or `}` on the same line.
    pub after: Option<String>,
}

/// `{ .. }`: statements, settings or lines of a section.
#[derive(Clone, Debug)]
pub struct Block {
    /// In the order of the text.
    pub stmts: Vec<Stmt>,
    /// Comments before the closing brace.
    pub tail: Vec<String>,
    /// The closing brace.
    pub end: Span,
}

/// What a statement, item or setting says.
#[derive(Clone, Debug)]
pub enum StmtKind {
    // These stand at the top of a file.
    /// `import "parts.mdl" as parts;`.
    Import {
        /// The `"parts.mdl"` of `import "parts.mdl"`, relative to the file with the import.
        path: Text,
        /// The `parts` of `as parts`; `None` makes functions callable without a prefix.
        alias: Option<Ident>,
    },
    /// `model mlp(batch, hidden = 512) { .. }`.
    Model(Rc<Model>),
    /// `train { .. }`: settings of the optimizer, and groups of parameters.
    Train(Block),
    /// `plan { .. }`: which dims each axis of the mesh splits.
    Plan(Block),
    /// `weights hf { .. }`: how a foreign checkpoint names and lays out the parameters.
    Weights {
        /// The `hf` of `weights hf`.
        name: Ident,
        /// The lines of a `weights` section: [`StmtKind::Weight`] and [`StmtKind::Bad`].
        block: Block,
    },
    // Functions also stand at the top of a file; the others are statements of models and functions.
    /// `fn f(x) { .. }` or `fn f(x) = relu(x);`, with `@op` or without.
    Fn(Rc<Function>),
    /// `dim keys = seq, slot;`: each name with its size; `None` for the `slot`.
    Dim(Vec<(Ident, Option<Expr>)>),
    /// `let a, b = f(x);`.
    Let {
        /// The `a` and `b` of `let a, b = f(x);`; `_` drops a value.
        names: Vec<Ident>,
        /// The `f(x)` of `let a, b = f(x);`: one value for each name.
        value: Expr,
    },
    /// `a, b = f(x);`.
    Assign {
        /// The `a` and `b` of `a, b = f(x);`, declared before in the same function.
        names: Vec<Ident>,
        /// The `f(x)` of `a, b = f(x);`: one value for each name.
        value: Expr,
    },
    /// `input tokens, labels: i32[batch, seq] = next(x) @any;`.
    Input {
        /// The `a` and `b` of `input a, b: i32[batch];`, each an input of its own.
        names: Vec<Ident>,
        /// The `i32[batch]` of `input a, b: i32[batch];`, for each of the names.
        ty: TypeExpr,
        /// The `next(x)` of `input y: i32[seq] = next(x);`: its default.
        value: Option<Expr>,
        /// The `any` of `@any`.
        attributes: Vec<Ident>,
    },
    /// `param w: [hidden] ~ normal(0.02) @no_decay;`.
    Param(Storage),
    /// `state s: [experts] = 0;`.
    State(Storage),
    /// `update s = e;`.
    Update {
        /// The `s` of `update s = e;`, which is a state.
        name: Ident,
        /// The `e` of `update s = e;`: what the state is from the next step on.
        value: Expr,
    },
    /// `if a { .. } else if b { .. } else { .. }`.
    If(If),
    /// `repeat i in layers as block { .. }`.
    Repeat(Repeat),
    /// `return a, b;`: one value or more.
    Return(Vec<Expr>),
    /// `f(x);`: an [`ExprKind::Call`], or an [`ExprKind::Bad`].
    Call(Expr),
    /// `loss main = e;`.
    Loss {
        /// The `main` of `loss main = e;`; `None` is reported as `loss`.
        name: Option<Ident>,
        /// The `e` of `loss main = e;`: a scalar; all losses of a model add up.
        value: Expr,
    },
    /// `metric accuracy = e;`.
    Metric {
        /// The `accuracy` of `metric accuracy = e;`, as which it is reported.
        name: Ident,
        /// The `e` of `metric accuracy = e;`: a scalar.
        value: Expr,
    },
    /// `output y, z;`: names of values to keep.
    Output(Vec<Ident>),
    /// `generate tokens = sample(logits, over: vocab, along: seq);`.
    Generate {
        /// The `tokens` of `generate tokens = sample(..);`, declared before.
        name: Ident,
        /// The `sample(..)` of `generate`: an [`ExprKind::Call`], or an [`ExprKind::Bad`].
        call: Expr,
    },
    // These stand in sections.
    /// `tp: heads, ffn | hidden;` or `lr: constant(0.05);`.
    Setting {
        /// The `tp` of `tp: heads, ffn | hidden;`.
        path: Path,
        /// The `heads, ffn` and the `hidden` of `tp: heads, ffn | hidden;`: one tier or more.
        tiers: Vec<Vec<Expr>>,
    },
    /// `group "embed", "*.b" { decay: false; }`.
    Group {
        /// The `"embed"` and `"*.b"` of `group "embed", "*.b"`; `*` stands for any text.
        patterns: Vec<Text>,
        /// Settings of the parameters whose names match: `decay: false;`.
        block: Block,
    },
    /// `q.w, k.w = "h.{layers}.qk" [(a | b), hidden];`.
    Weight {
        /// The `q.w` and `k.w` left of `=`: parameter names without iteration numbers.
        paths: Vec<Path>,
        /// The `"h.{layers}.x"` of `w = "h.{layers}.x"`: a foreign name for each iteration.
        template: Text,
        /// Templates of copies.
        copies: Vec<Text>,
        /// The `[heads*head_dim, hidden]` behind a template, outermost first; `None`: as declared.
        layout: Option<Vec<Product>>,
    },
    /// Did not parse (an error says so); the names that it seems to declare.
    Bad(Vec<Ident>),
}

/// `model mlp(batch, hidden = 512) { .. }`.
#[derive(Clone, Debug)]
pub struct Model {
    /// The `mlp` of `model mlp(batch)`.
    pub name: Ident,
    /// The `batch` and `hidden = 512` of `model mlp(batch, hidden = 512)`, in order.
    pub settings: Vec<Header>,
    /// The `{ .. }` behind the settings.
    pub body: Block,
}

/// `@op fn f(x, d: dim = hidden) -> [..] { .. }`.
#[derive(Clone, Debug)]
pub struct Function {
    /// Whether `@op` is before `fn`: a call may be treated as one operation.
    pub op: bool,
    /// The `f` of `fn f(x)`.
    pub name: Ident,
    /// The `x` and `d: dim` of `fn f(x, d: dim)`, in the order of arguments by position.
    pub params: Vec<Header>,
    /// The `[..]` of `-> [..]`, one for each value; empty without a `->`.
    pub results: Vec<TypeExpr>,
    /// What a call evaluates to its results.
    pub body: Body,
}

/// The body of a function.
#[derive(Clone, Debug)]
pub enum Body {
    /// The `{ .. }` of `fn f(x) { .. }`.
    Block(Block),
    /// The `relu(x)` of `fn f(x) = relu(x);`.
    Short(Expr),
}

/// A setting of a model or a parameter of a function.
#[derive(Clone, Debug)]
pub struct Header {
    /// The `d` of `d: dim = hidden`.
    pub name: Ident,
    /// The `dim` of `d: dim = hidden`; `None` without a `:`, or with an unknown kind.
    pub kind: Option<ParamKind>,
    /// The `hidden` of `d: dim = hidden`; `None`: a value has to be given.
    pub default: Option<Expr>,
}

/// The `int` of `n: int`: which values a parameter or setting takes.
#[derive(Clone, Debug)]
pub enum ParamKind {
    /// `[.., d]`: tensors.
    Type(TypeExpr),
    /// `int`: a static whole number, 64 bits.
    Int,
    /// `real`: a static number, 64 bits.
    Real,
    /// `bool`: a static `true` or `false`.
    Bool,
    /// `text`: a static text.
    Text,
    /// `reals`: a static list of numbers.
    Reals,
    /// `dim`: a dim.
    Dim,
    /// `dims`: a list of dims.
    Dims,
}

/// `[.., hidden]`, `i32[tokens.., k]`.
#[derive(Clone, Debug)]
pub struct TypeExpr {
    /// The `i32` of `i32[seq]`; `None`: the working precision, or any floats for a parameter.
    pub dtype: Option<Ident>,
    /// The `batch` and `seq` of `[batch, seq]`, in the order of storage.
    pub dims: Vec<TypeDim>,
    /// From the element type or the `[` to the `]`.
    pub span: Span,
}

/// One of `tokens..` and `k` in `[tokens.., k]`.
#[derive(Clone, Debug)]
pub enum TypeDim {
    /// `..`: any dims beside those that are named.
    Rest,
    /// `k`, or `tokens..` for the dims of a list.
    Element(Element),
}

/// An element of a list; `spread` if `..` follows it.
#[derive(Clone, Debug)]
pub struct Element {
    /// The `k` of `k`, or the `tokens` of `tokens..`.
    pub expr: Expr,
    /// Whether `..` follows: the dims of the list stand in its place.
    pub spread: bool,
}

/// `param`s or `state`s of one statement.
#[derive(Clone, Debug)]
pub struct Storage {
    /// The `a` and `b` of `param a, b: [hidden] = 0;`, each stored by itself.
    pub names: Vec<Ident>,
    /// The `[hidden]` of `param a, b: [hidden] = 0;`, for each of the names.
    pub ty: TypeExpr,
    /// What elements are before the first step: drawn, or all one number.
    pub init: Init,
    /// The `no_decay` of `@no_decay`.
    pub attributes: Vec<Ident>,
}

/// The `~ normal(0.02)` or `= 0` of a `param` or `state`.
#[derive(Clone, Debug)]
pub enum Init {
    /// The `normal(0.02)` of `~ normal(0.02)`.
    Drawn(Expr),
    /// The `0` of `= 0`, for all elements.
    Value(Expr),
}

/// `if a { .. } else if b { .. } else { .. }`, decided when the text is evaluated.
#[derive(Clone, Debug)]
pub struct If {
    /// `if`, then each `else if`.
    pub branches: Vec<(Expr, Block)>,
    /// The block of a last `else` without a condition.
    pub otherwise: Option<Block>,
}

/// `repeat i in layers as block { .. }`, unrolled when the text is evaluated.
#[derive(Clone, Debug)]
pub struct Repeat {
    /// The `i` of `repeat i in layers`: the number of the iteration, from 0.
    pub counter: Option<Ident>,
    /// The `layers` of `repeat i in layers`: a dim or a static int, how often.
    pub count: Ident,
    /// The `block` of `repeat layers as block`: in parameter names, in place of `layers`.
    pub alias: Option<Ident>,
    /// The `{ .. }` behind `repeat i in layers`.
    pub body: Block,
}

/// An expression: `a * (b + 1)`.
#[derive(Clone, Debug)]
pub struct Expr {
    /// The outermost operator, or a leaf.
    pub kind: ExprKind,
    /// Where it stands; of several lines perhaps the first alone.
    pub span: Span,
    /// Nodes on the longest way down, this one included; bounded by the parser.
    pub depth: u16,
}

/// What an expression is.
#[derive(Clone, Debug)]
pub enum ExprKind {
    /// Did not parse; an error says so.
    Bad,
    /// `50_304`: its value and its spelling.
    Int(i64, Rc<str>),
    /// `1e-5`: its value and its spelling.
    Real(f64, Rc<str>),
    /// `"gelu"`, without the quotes.
    Text(Rc<str>),
    /// `true` or `false`.
    Bool(bool),
    /// `none`: an argument that is absent.
    None,
    /// `hidden`: the name of a value; functions are no values.
    Name(Rc<str>),
    /// `(a + b)`: what is between the parentheses.
    Paren(Box<Expr>),
    /// `[batch, seq]`, `[tokens.., k]`, `[1.0, 2]` or `[]`.
    List(Vec<Element>),
    /// `relu(x)`.
    Call(Call),
    /// `table[vocab: i]`.
    Index {
        /// The `table` of `table[vocab: i]`.
        base: Box<Expr>,
        /// The `vocab` and `i` of `table[vocab: i]`, one pair or more.
        items: Vec<(Ident, Expr)>,
    },
    /// `-x` or `not b`.
    Unary {
        /// The `-` of `-x`.
        op: UnaryOp,
        /// The `x` of `-x`.
        arg: Box<Expr>,
    },
    /// `a + b`.
    Binary {
        /// The `+` of `a + b`.
        op: BinaryOp,
        /// Where the `+` of `a + b` stands.
        op_span: Span,
        /// The `a` of `a + b`.
        left: Box<Expr>,
        /// The `b` of `a + b`.
        right: Box<Expr>,
    },
}

/// `parts.f(x, over: d) as norm`.
#[derive(Clone, Debug)]
pub struct Call {
    /// The `parts.f` of `parts.f(x)`; one name for functions of this file and primitives.
    pub path: Path,
    /// The `x` and `over: d` of `f(x, over: d)`, in the order of the text.
    pub args: Vec<Arg>,
    /// The `norm` of `f(x) as norm`: a segment of parameter names.
    pub alias: Option<Ident>,
}

/// An argument: `x`, `over: d` or `a -> b`.
#[derive(Clone, Debug)]
pub struct Arg {
    /// The `over` of `over: d`; `None` for an argument by position.
    pub name: Option<Ident>,
    /// The `d` of `over: d`, or the `a` of `a -> b`.
    pub value: Expr,
    /// The `b` of `a -> b`.
    pub to: Option<Expr>,
}

/// Names with dots between them: `layers.attn.q.w`.
#[derive(Clone, Debug)]
pub struct Path {
    /// The `parts` and `f` of `parts.f`, one or more.
    pub parts: Vec<Ident>,
}

/// A text in quotes.
#[derive(Clone, Debug)]
pub struct Text {
    /// The `gelu` of `"gelu"`.
    pub text: Rc<str>,
    /// Where it stands, quotes included.
    pub span: Span,
}

/// An operator before its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnaryOp {
    /// `-`: the negative.
    Neg,
    /// `not`: the opposite of a bool.
    Not,
}

/// An operator between two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryOp {
    /// `or`: the loosest operator.
    Or,
    /// `and`: tighter than `or`, looser than `not`.
    And,
    /// `==`: equal.
    Eq,
    /// `!=`: not equal.
    Ne,
    /// `<`: less.
    Lt,
    /// `<=`: less or equal.
    Le,
    /// `>`: greater.
    Gt,
    /// `>=`: greater or equal.
    Ge,
    /// `+`: the sum.
    Add,
    /// `-`: the difference.
    Sub,
    /// `*`: the product.
    Mul,
    /// `/`: exact for two static ints, else real division.
    Div,
    /// `%`: the remainder, floored.
    Rem,
    /// `^`: a power, grouped from the right.
    Pow,
}

/// A dim of a foreign tensor: merged dims, row-major.
#[derive(Clone, Debug)]
pub struct Product {
    /// The `heads` and `head_dim` of `heads*head_dim`, outermost first.
    pub atoms: Vec<Atom>,
}

/// A factor of a merged dim: `heads` or `(a | b)`.
#[derive(Clone, Debug)]
pub enum Atom {
    /// `heads`: a dim of the model.
    Dim(Ident),
    /// `(a | b)`: concatenated, one alternative per parameter.
    Choice(Vec<Product>),
}

impl Path {
    /// From the first name to the last; the first alone if they are on several lines.
    pub fn span(&self) -> Span {
        let first = self.parts[0].span;
        let last = self.parts[self.parts.len() - 1].span;
        if first.line == last.line { Span { len: last.col + last.len - first.col, ..first } } else { first }
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, part) in self.parts.iter().enumerate() {
            if i > 0 {
                f.write_str(".")?;
            }
            f.write_str(&part.name)?;
        }
        Ok(())
    }
}

impl BinaryOp {
    /// As the text writes it: `or`, `==`, `+`.
    pub fn symbol(self) -> &'static str {
        match self {
            BinaryOp::Or => "or",
            BinaryOp::And => "and",
            BinaryOp::Eq => "==",
            BinaryOp::Ne => "!=",
            BinaryOp::Lt => "<",
            BinaryOp::Le => "<=",
            BinaryOp::Gt => ">",
            BinaryOp::Ge => ">=",
            BinaryOp::Add => "+",
            BinaryOp::Sub => "-",
            BinaryOp::Mul => "*",
            BinaryOp::Div => "/",
            BinaryOp::Rem => "%",
            BinaryOp::Pow => "^",
        }
    }

    /// Whether it is one of `==`, `!=`, `<`, `<=`, `>` and `>=`, which do not chain.
    pub fn is_comparison(self) -> bool {
        match self {
            BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge => true,
            BinaryOp::Or | BinaryOp::And | BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow => false,
        }
    }
}
