//! The tree of an .mdl text, as written: nothing is resolved, numbers keep their spelling, parentheses and comments are kept,
//! so that the formatter prints from it.

use ir::diag::Span;
use std::rc::Rc;

/// A parsed file: its top-level items in order.
#[derive(Clone, Debug)]
pub struct Ast {
    /// Number of the file in the `Sources`.
    pub file: u16,
    pub items: Vec<Stmt>,
    /// Comments after the last item.
    pub tail: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ident {
    pub name: Rc<str>,
    pub span: Span,
}

/// A statement, item or setting with the comments that belong to it.
#[derive(Clone, Debug)]
pub struct Stmt {
    pub kind: StmtKind,
    pub span: Span,
    pub trivia: Trivia,
}

/// Comments (without their `//`) and blank lines around a statement.
#[derive(Clone, Debug, Default)]
pub struct Trivia {
    pub blank_before: bool,
    pub before: Vec<String>,
    pub after: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Block {
    pub stmts: Vec<Stmt>,
    /// Comments before the closing brace.
    pub tail: Vec<String>,
    /// The closing brace.
    pub end: Span,
}

#[derive(Clone, Debug)]
pub enum StmtKind {
    // File level
    Import {
        path: Text,
        alias: Option<Ident>,
    },
    Model(Rc<Model>),
    Train(Block),
    Plan(Block),
    Weights {
        name: Ident,
        block: Block,
    },
    // Statements
    Fn(Rc<Function>),
    Dim(Vec<(Ident, Option<Expr>)>),
    Let {
        names: Vec<Ident>,
        value: Expr,
    },
    Assign {
        names: Vec<Ident>,
        value: Expr,
    },
    Input {
        names: Vec<Ident>,
        ty: TypeExpr,
        value: Option<Expr>,
        attributes: Vec<Ident>,
    },
    Param(Storage),
    State(Storage),
    Update {
        name: Ident,
        value: Expr,
    },
    If(If),
    Repeat(Repeat),
    Return(Vec<Expr>),
    Call(Expr),
    Loss {
        name: Option<Ident>,
        value: Expr,
    },
    Metric {
        name: Ident,
        value: Expr,
    },
    Output(Vec<Ident>),
    Generate {
        name: Ident,
        call: Expr,
    },
    // Sections
    Setting {
        path: Path,
        tiers: Vec<Vec<Expr>>,
    },
    Group {
        patterns: Vec<Text>,
        block: Block,
    },
    Weight {
        paths: Vec<Path>,
        template: Text,
        /// Templates of copies.
        copies: Vec<Text>,
        layout: Option<Vec<Product>>,
    },
    /// Did not parse (an error says so); the names that it seems to declare.
    Bad(Vec<Ident>),
}

#[derive(Clone, Debug)]
pub struct Model {
    pub name: Ident,
    pub settings: Vec<Header>,
    pub body: Block,
}

#[derive(Clone, Debug)]
pub struct Function {
    pub op: bool,
    pub name: Ident,
    pub params: Vec<Header>,
    pub results: Vec<TypeExpr>,
    pub body: Body,
}

#[derive(Clone, Debug)]
pub enum Body {
    Block(Block),
    Short(Expr),
}

/// A setting of a model or a parameter of a function.
#[derive(Clone, Debug)]
pub struct Header {
    pub name: Ident,
    pub kind: Option<Kind>,
    pub default: Option<Expr>,
}

#[derive(Clone, Debug)]
pub enum Kind {
    Type(TypeExpr),
    Int,
    Real,
    Bool,
    Text,
    Reals,
    Dim,
    Dims,
}

/// `[.., hidden]`, `i32[tokens.., k]`.
#[derive(Clone, Debug)]
pub struct TypeExpr {
    pub dtype: Option<Ident>,
    pub dims: Vec<TypeDim>,
    pub span: Span,
}

#[derive(Clone, Debug)]
pub enum TypeDim {
    Rest,
    Element(Element),
}

/// An element of a list; `spread` if `..` follows it.
#[derive(Clone, Debug)]
pub struct Element {
    pub expr: Expr,
    pub spread: bool,
}

/// `param`s or `state`s of one statement.
#[derive(Clone, Debug)]
pub struct Storage {
    pub names: Vec<Ident>,
    pub ty: TypeExpr,
    pub init: Init,
    pub attributes: Vec<Ident>,
}

#[derive(Clone, Debug)]
pub enum Init {
    Drawn(Expr),
    Value(Expr),
}

#[derive(Clone, Debug)]
pub struct If {
    /// `if`, then each `else if`.
    pub branches: Vec<(Expr, Block)>,
    pub otherwise: Option<Block>,
}

#[derive(Clone, Debug)]
pub struct Repeat {
    pub counter: Option<Ident>,
    pub count: Ident,
    pub alias: Option<Ident>,
    pub body: Block,
}

#[derive(Clone, Debug)]
pub struct Expr {
    pub kind: ExprKind,
    pub span: Span,
    /// Nodes on the longest way down, this one included; bounded by the parser.
    pub depth: u16,
}

#[derive(Clone, Debug)]
pub enum ExprKind {
    /// Did not parse; an error says so.
    Bad,
    Int(i64, Rc<str>),
    Real(f64, Rc<str>),
    Text(Rc<str>),
    Bool(bool),
    None,
    Name(Rc<str>),
    Paren(Box<Expr>),
    List(Vec<Element>),
    Call(Call),
    Index {
        base: Box<Expr>,
        items: Vec<(Ident, Expr)>,
    },
    Unary {
        op: UnaryOp,
        arg: Box<Expr>,
    },
    Binary {
        op: BinaryOp,
        op_span: Span,
        left: Box<Expr>,
        right: Box<Expr>,
    },
}

#[derive(Clone, Debug)]
pub struct Call {
    pub path: Path,
    pub args: Vec<Arg>,
    pub alias: Option<Ident>,
}

#[derive(Clone, Debug)]
pub struct Arg {
    pub name: Option<Ident>,
    pub value: Expr,
    /// The `b` of `a -> b`.
    pub to: Option<Expr>,
}

#[derive(Clone, Debug)]
pub struct Path {
    pub parts: Vec<Ident>,
}

#[derive(Clone, Debug)]
pub struct Text {
    pub text: Rc<str>,
    pub span: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnaryOp {
    Neg,
    Not,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryOp {
    Or,
    And,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Pow,
}

/// A dim of a foreign tensor: merged dims, row-major.
#[derive(Clone, Debug)]
pub struct Product {
    pub atoms: Vec<Atom>,
}

#[derive(Clone, Debug)]
pub enum Atom {
    Dim(Ident),
    /// `(a | b)`: concatenated, one alternative per parameter.
    Choice(Vec<Product>),
}

impl Path {
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

    pub fn is_comparison(self) -> bool {
        match self {
            BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge => true,
            BinaryOp::Or | BinaryOp::And | BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow => false,
        }
    }
}
