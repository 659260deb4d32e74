//! Questions about names that the tree alone answers.

use crate::ast::*;
use ir::diag::Span;
use std::rc::Rc;

/// The names that statements declare in their function, in either branch of each `if`.
pub fn declared(stmts: &[Stmt]) -> Vec<Ident> {
    let mut out = vec![];
    for stmt in stmts {
        match &stmt.kind {
            StmtKind::Let { names, .. } | StmtKind::Input { names, .. } | StmtKind::Bad(names) => out.extend(names.iter().cloned()),
            StmtKind::Param(storage) | StmtKind::State(storage) => out.extend(storage.names.iter().cloned()),
            StmtKind::Dim(items) => out.extend(items.iter().map(|(n, _)| n.clone())),
            StmtKind::If(branch) => {
                for block in branch.branches.iter().map(|(_, b)| b).chain(&branch.otherwise) {
                    out.extend(declared(&block.stmts));
                }
            }
            _ => {}
        }
    }
    out
}

/// The names that statements change, inside `if` and `repeat` too, each once, in text order.
pub fn assigned(stmts: &[Stmt]) -> Vec<Rc<str>> {
    let mut out: Vec<Rc<str>> = vec![];
    let mut add = |names: Vec<Rc<str>>| {
        for name in names {
            if !out.contains(&name) {
                out.push(name);
            }
        }
    };
    for stmt in stmts {
        match &stmt.kind {
            StmtKind::Assign { names, .. } => add(names.iter().map(|n| n.name.clone()).collect()),
            StmtKind::If(branch) => {
                for block in branch.branches.iter().map(|(_, b)| b).chain(&branch.otherwise) {
                    add(assigned(&block.stmts));
                }
            }
            StmtKind::Repeat(repeat) => add(assigned(&repeat.body.stmts)),
            _ => {}
        }
    }
    out
}

/// The names of values that an expression uses.
pub fn names_in(expr: &Expr) -> Vec<(Rc<str>, Span)> {
    let mut out = vec![];
    collect(expr, &mut out);
    out
}

fn collect(expr: &Expr, out: &mut Vec<(Rc<str>, Span)>) {
    match &expr.kind {
        ExprKind::Name(name) => out.push((name.clone(), expr.span)),
        ExprKind::Paren(inner) | ExprKind::Unary { arg: inner, .. } => collect(inner, out),
        ExprKind::List(items) => items.iter().for_each(|e| collect(&e.expr, out)),
        ExprKind::Call(call) => {
            for arg in &call.args {
                collect(&arg.value, out);
                if let Some(to) = &arg.to {
                    collect(to, out);
                }
            }
        }
        ExprKind::Index { base, items } => {
            collect(base, out);
            for (name, index) in items {
                out.push((name.name.clone(), name.span));
                collect(index, out);
            }
        }
        ExprKind::Binary { left, right, .. } => {
            collect(left, out);
            collect(right, out);
        }
        ExprKind::Int(..) | ExprKind::Real(..) | ExprKind::Text(_) | ExprKind::Bool(_) | ExprKind::None | ExprKind::Bad => {}
    }
}

/// Names that a plan or a layout can use: settings, `dim`s anywhere in the file, and the names of repeats.
pub fn dim_names(ast: &Ast, model: &Model) -> Vec<Rc<str>> {
    let mut out: Vec<Rc<str>> = model.settings.iter().map(|s| s.name.name.clone()).collect();
    dims_in(&model.body.stmts, &mut out);
    dims_in(&ast.items, &mut out);
    out
}

fn dims_in(stmts: &[Stmt], out: &mut Vec<Rc<str>>) {
    for stmt in stmts {
        match &stmt.kind {
            StmtKind::Dim(items) => out.extend(items.iter().map(|(n, _)| n.name.clone())),
            StmtKind::Bad(names) => out.extend(names.iter().map(|n| n.name.clone())),
            StmtKind::If(branch) => {
                for block in branch.branches.iter().map(|(_, b)| b).chain(&branch.otherwise) {
                    dims_in(&block.stmts, out);
                }
            }
            StmtKind::Repeat(repeat) => {
                out.extend(repeat.alias.iter().map(|a| a.name.clone()));
                dims_in(&repeat.body.stmts, out);
            }
            StmtKind::Fn(function) => {
                out.extend(function.params.iter().filter(|p| matches!(p.kind, Some(ParamKind::Dim))).map(|p| p.name.name.clone()));
                if let Body::Block(block) = &function.body {
                    dims_in(&block.stmts, out);
                }
            }
            _ => {}
        }
    }
}
