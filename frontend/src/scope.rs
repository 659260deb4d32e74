//! Name resolution over the whole text: also in branches that are not taken and functions that are never called.
//! Elaboration looks names up again where it evaluates; what is found here is not reported twice.

use crate::ast::*;
use crate::foreign;
use crate::names::nearest;
use ir::diag::{Diagnostic, Span};
use std::rc::Rc;

/// The functions by which an input derives from another one.
pub const LOADERS: [&str; 5] = ["next", "prev", "documents", "positions", "ahead"];
const CONSTANTS: [&str; 3] = ["pi", "inf", "training"];

/// What the text may use beside its own names.
pub struct KnownNames {
    /// Functions of the library and of files imported without `as`, and primitives.
    pub functions: Vec<Rc<str>>,
    /// Names of imports.
    pub modules: Vec<Rc<str>>,
}

/// The errors of names in a file, and warnings for values that nothing uses (unless `incomplete`: parts did not
/// parse).
pub fn check(ast: &Ast, known: &KnownNames, incomplete: bool) -> Vec<Diagnostic> {
    let mut resolver = Resolver { known, functions: vec![], out: vec![], incomplete };
    resolver.functions.push(FunctionScope::default());
    for item in &ast.items {
        if let StmtKind::Fn(function) = &item.kind {
            let own = &mut resolver.functions[0].fns;
            match own.iter().find(|(name, _)| *name == function.name.name) {
                Some((_, first)) => {
                    let e = twice("function", &function.name, *first);
                    resolver.out.push(e.help("rename one of them"));
                }
                None => own.push((function.name.name.clone(), function.name.span)),
            }
        }
        if let StmtKind::Bad(names) = &item.kind {
            resolver.functions[0].fns.extend(names.iter().map(|n| (n.name.clone(), n.span)));
        }
    }
    for item in &ast.items {
        match &item.kind {
            StmtKind::Fn(function) => resolver.function(function),
            StmtKind::Model(model) => resolver.model(model),
            _ => {}
        }
    }
    resolver.out
}

fn twice(what: &str, name: &Ident, first: Span) -> Diagnostic {
    let e = Diagnostic::error("E0402", format!("{what} `{}` is already declared (line {})", name.name, first.line));
    e.label(name.span, "again").label(first, "first time")
}

#[derive(Clone, Copy, PartialEq)]
enum LocalKind {
    /// Function parameters, settings and inputs, which need not be used.
    Given,
    Value,
    Dim,
    Param,
}

struct Local {
    name: Rc<str>,
    span: Span,
    kind: LocalKind,
    used: bool,
    /// The number of `repeat`s around it.
    depth: usize,
}

/// The names of one function (or the model, or the file) while it is read.
#[derive(Default)]
struct FunctionScope {
    locals: Vec<Local>,
    fns: Vec<(Rc<str>, Span)>,
    depth: usize,
    /// The body of the model, which returns nothing.
    is_model: bool,
    /// All names that it declares anywhere, to tell names used too early from unknown ones.
    all: Vec<Ident>,
    /// Its dims with the names that their sizes use.
    sizes: Vec<(Rc<str>, Vec<Rc<str>>)>,
}

struct Resolver<'a> {
    known: &'a KnownNames,
    functions: Vec<FunctionScope>,
    out: Vec<Diagnostic>,
    incomplete: bool,
}

impl Resolver<'_> {
    fn top(&mut self) -> &mut FunctionScope {
        self.functions.last_mut().expect("invariant: the file's scope stays")
    }

    fn model(&mut self, model: &Model) {
        self.functions.push(FunctionScope { is_model: true, ..FunctionScope::default() });
        for setting in &model.settings {
            // Elaboration reports settings that are declared twice or used too early.
            self.top().locals.push(Local { name: setting.name.name.clone(), span: setting.name.span, kind: LocalKind::Given, used: true, depth: 0 });
        }
        for setting in &model.settings {
            if let Some(default) = &setting.default {
                self.expr(default);
            }
        }
        self.foresee(&model.body.stmts);
        self.stmts(&model.body.stmts);
        self.leave();
    }

    fn function(&mut self, function: &crate::ast::Function) {
        self.functions.push(FunctionScope::default());
        for param in &function.params {
            self.declare(&param.name, LocalKind::Given);
        }
        for param in &function.params {
            if let Some(ParamKind::Type(ty)) = &param.kind {
                self.type_expr(ty);
            }
            if let Some(default) = &param.default {
                self.expr(default);
            }
        }
        for ty in &function.results {
            self.type_expr(ty);
        }
        match &function.body {
            Body::Block(block) => {
                self.foresee(&block.stmts);
                self.stmts(&block.stmts);
            }
            Body::Short(expr) => self.expr(expr),
        }
        self.leave();
    }

    /// Notes what a body will declare.
    fn foresee(&mut self, stmts: &[Stmt]) {
        let top = self.top();
        top.all.extend(crate::resolve::declared(stmts));
        for stmt in stmts {
            if let StmtKind::Dim(items) = &stmt.kind {
                for (name, size) in items {
                    let uses = size.iter().flat_map(crate::resolve::names_in).map(|(n, _)| n).collect();
                    top.sizes.push((name.name.clone(), uses));
                }
            }
        }
    }

    /// Whether the size of dim `from` depends on dim `to`.
    fn depends(&self, from: &Rc<str>, to: &Rc<str>) -> bool {
        let sizes = self.functions.last().map_or(&[][..], |f| &f.sizes);
        let mut tried: Vec<&Rc<str>> = vec![];
        let mut open = vec![from];
        while let Some(name) = open.pop() {
            if tried.contains(&name) {
                continue;
            }
            tried.push(name);
            for (_, uses) in sizes.iter().filter(|(n, _)| n == name) {
                if uses.contains(to) {
                    return true;
                }
                open.extend(uses);
            }
        }
        false
    }

    fn leave(&mut self) {
        if let Some(function) = self.functions.pop() {
            function.locals.iter().for_each(|local| self.unused(local));
        }
    }

    fn unused(&mut self, local: &Local) {
        let what = match local.kind {
            LocalKind::Given => return,
            LocalKind::Value => "value",
            LocalKind::Dim => "dim",
            LocalKind::Param => "parameter",
        };
        if !local.used && !self.incomplete && !local.name.starts_with('_') {
            let e = Diagnostic::warning("W0401", format!("{what} `{}` is never used", local.name)).label(local.span, "declared here");
            self.out.push(match local.kind {
                LocalKind::Value => {
                    e.help(format!("remove it, or call it `_{}`; an assignment to an outer name is written without `let`", local.name))
                }
                LocalKind::Given | LocalKind::Dim | LocalKind::Param => e.help("remove it, or use it"),
            });
        }
    }

    fn stmts(&mut self, stmts: &[Stmt]) {
        stacker::maybe_grow(256 * 1024, 4 * 1024 * 1024, || stmts.iter().for_each(|s| self.stmt(s)));
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match &stmt.kind {
            StmtKind::Dim(items) => {
                for (name, size) in items {
                    size.iter().for_each(|e| self.expr(e));
                    self.declare(name, LocalKind::Dim);
                }
            }
            StmtKind::Let { names, value } => {
                self.expr(value);
                names.iter().for_each(|n| self.declare(n, LocalKind::Value));
            }
            StmtKind::Assign { names, value } => {
                self.expr(value);
                names.iter().for_each(|n| self.assign(n));
            }
            StmtKind::Input { names, ty, value, attributes: _ } => {
                self.type_expr(ty);
                match value.as_ref().map(|v| (&v.kind, v)) {
                    Some((ExprKind::Call(call), _)) if LOADERS.contains(&call.path.to_string().as_str()) => self.args(call),
                    // Elaboration knows what else a default can be.
                    Some((ExprKind::Call(_), _)) | None => {}
                    Some((_, value)) => self.expr(value),
                }
                names.iter().for_each(|n| self.declare(n, LocalKind::Given));
            }
            StmtKind::Param(storage) | StmtKind::State(storage) => {
                self.type_expr(&storage.ty);
                match &storage.init {
                    Init::Drawn(expr) | Init::Value(expr) => match &expr.kind {
                        // Elaboration says which distributions there are.
                        ExprKind::Call(call) if call.path.to_string() == "normal" || matches!(storage.init, Init::Drawn(_)) => self.args(call),
                        _ => self.expr(expr),
                    },
                }
                storage.names.iter().for_each(|n| self.declare(n, LocalKind::Param));
            }
            StmtKind::Update { name, value } => {
                self.name(&name.name, name.span);
                self.expr(value);
            }
            StmtKind::If(branch) => self.branches(branch),
            StmtKind::Repeat(repeat) => {
                self.name(&repeat.count.name, repeat.count.span);
                self.top().depth += 1;
                let before = self.top().locals.len();
                if let Some(counter) = &repeat.counter {
                    self.declare(counter, LocalKind::Given);
                }
                self.stmts(&repeat.body.stmts);
                self.top().depth -= 1;
                let own = self.top().locals.split_off(before);
                own.iter().for_each(|local| self.unused(local));
            }
            StmtKind::Return(values) => {
                if self.top().is_model {
                    let e = Diagnostic::error("E0109", "`return` stands outside of a function").label(stmt.span, "in a model");
                    self.out.push(e.help("a model ends with `loss ..;` or `output ..;`"));
                }
                values.iter().for_each(|v| self.expr(v));
            }
            StmtKind::Fn(function) => {
                let first = self.top().fns.iter().find(|(name, _)| *name == function.name.name).map(|f| f.1);
                if let Some(first) = first {
                    self.out.push(twice("function", &function.name, first).help("rename one of them"));
                }
                self.top().fns.push((function.name.name.clone(), function.name.span));
                self.function(function);
            }
            StmtKind::Call(call) => self.expr(call),
            StmtKind::Loss { value, .. } | StmtKind::Metric { value, .. } => self.expr(value),
            StmtKind::Output(names) => names.iter().for_each(|n| self.name(&n.name, n.span)),
            StmtKind::Generate { name, call } => {
                self.name(&name.name, name.span);
                if let ExprKind::Call(call) = &call.kind {
                    self.args(call);
                    if call.path.to_string() != "sample" {
                        let e = Diagnostic::error("E0401", format!("`generate` knows no `{}`", call.path)).label(call.path.span(), "unknown");
                        self.out.push(e.help("`generate tokens = sample(logits, over: vocab, along: seq);`"));
                    }
                }
            }
            StmtKind::Bad(names) => {
                for name in names {
                    self.top().fns.push((name.name.clone(), name.span));
                    let depth = self.top().depth;
                    self.top().locals.push(Local { name: name.name.clone(), span: name.span, kind: LocalKind::Given, used: true, depth });
                }
            }
            StmtKind::Import { .. }
            | StmtKind::Model(_)
            | StmtKind::Train(_)
            | StmtKind::Plan(_)
            | StmtKind::Weights { .. }
            | StmtKind::Setting { .. }
            | StmtKind::Group { .. }
            | StmtKind::Weight { .. } => {}
        }
    }

    /// Resolves the branches of an `if`. Each may declare the same names. Afterwards the names of all branches are
    /// known, except for those that return.
    fn branches(&mut self, branch: &If) {
        let before = self.top().locals.len();
        let mut all: Vec<Local> = vec![];
        for (cond, block) in branch.branches.iter().map(|(c, b)| (Some(c), b)).chain(branch.otherwise.iter().map(|b| (None, b))) {
            cond.iter().for_each(|c| self.expr(c));
            self.stmts(&block.stmts);
            let returns = matches!(block.stmts.last().map(|s| &s.kind), Some(StmtKind::Return(_)));
            for local in self.top().locals.split_off(before) {
                if returns {
                    self.unused(&local);
                    continue;
                }
                match all.iter_mut().find(|l| l.name == local.name) {
                    Some(first) => first.used |= local.used,
                    None => all.push(local),
                }
            }
        }
        self.top().locals.extend(all);
    }

    fn declare(&mut self, name: &Ident, kind: LocalKind) {
        if &*name.name == "_" {
            return;
        }
        let depth = self.top().depth;
        let mut used = false;
        if let Some((first, outer)) = self.top().locals.iter().find(|l| l.name == name.name).map(|l| (l.span, l.depth)) {
            let e = Diagnostic::error("E0402", format!("`{}` is already declared in this function (line {})", name.name, first.line));
            let e = e.label(name.span, "again").label(first, "first time");
            used = true;
            self.out.push(match outer < depth {
                true => e.help(format!("`{0} = ..` carries `{0}` from one iteration to the next; a new `{0}` would be lost after each", name.name)),
                false => e.help(format!("`{} = ..` changes it; or choose another name", name.name)),
            });
        }
        self.top().locals.push(Local { name: name.name.clone(), span: name.span, kind, used, depth });
    }

    fn assign(&mut self, name: &Ident) {
        if &*name.name == "_" || self.top().locals.iter().any(|l| l.name == name.name) {
            return;
        }
        let outer = self.functions.iter().rev().find_map(|f| f.locals.iter().find(|l| l.name == name.name)).map(|l| l.span);
        let error = match outer {
            Some(span) => {
                let e = Diagnostic::error("E0403", format!("`{}` belongs to the text around this function", name.name));
                e.label(name.span, "cannot be changed here").label(span, "declared here").help("return the new value instead")
            }
            None => {
                let e = Diagnostic::error("E0401", format!("`{}` is not declared", name.name)).label(name.span, "changed here");
                match nearest(&name.name, self.top().locals.iter().map(|l| &*l.name)) {
                    Some(near) => e.help(format!("did you mean `{near}`?")),
                    None => e.help(format!("declare it with `let {} = ..`", name.name)),
                }
            }
        };
        self.out.push(error);
        // The name is known from here on, so that each forgotten `let` gives one error.
        let depth = self.top().depth;
        self.top().locals.push(Local { name: name.name.clone(), span: name.span, kind: LocalKind::Given, used: true, depth });
    }

    fn name(&mut self, name: &Rc<str>, span: Span) {
        for function in self.functions.iter_mut().rev() {
            let mut found = false;
            for local in function.locals.iter_mut().filter(|l| l.name == *name) {
                local.used = true;
                found = true;
            }
            if found {
                return;
            }
        }
        if CONSTANTS.contains(&&**name) {
            return;
        }
        if let Some(later) = self.functions.iter().rev().find_map(|f| f.all.iter().find(|n| n.name == *name)) {
            let place = later.span;
            let e = if self.depends(name, name) {
                let e = Diagnostic::error("E0405", format!("the size of dim `{name}` depends on itself")).label(span, "needs the size");
                e.label(place, "declared here").help("give one of the dims a number or a setting")
            } else {
                let e = Diagnostic::error("E0404", format!("`{name}` is used before it is declared (line {})", place.line));
                e.label(span, "not known yet").label(place, "declared here").help("statements run in order: declare it above")
            };
            self.out.push(e);
            return;
        }
        let e = Diagnostic::error("E0401", format!("nothing is called `{name}` here")).label(span, "unknown name");
        let visible = self.functions.iter().rev().flat_map(|f| f.locals.iter().map(|l| &*l.name)).chain(CONSTANTS);
        let e = match nearest(name, visible) {
            Some(near) => e.help(format!("did you mean `{near}`?")),
            None if let Some(way) = foreign::name(name) => e.help(way),
            None if self.is_function(name) => e.help(format!("`{name}` is a function: functions are called, they are no values")),
            None => e.help("declare it above: `let`, `dim`, `input` or `param`"),
        };
        self.out.push(e);
    }

    fn is_function(&self, name: &str) -> bool {
        self.functions.iter().any(|f| f.fns.iter().any(|(n, _)| **n == *name)) || self.known.functions.iter().any(|n| **n == *name)
    }

    fn type_expr(&mut self, ty: &TypeExpr) {
        for dim in &ty.dims {
            if let TypeDim::Element(element) = dim {
                self.expr(&element.expr);
            }
        }
    }

    fn args(&mut self, call: &Call) {
        for arg in &call.args {
            self.expr(&arg.value);
            arg.to.iter().for_each(|to| self.expr(to));
        }
    }

    fn call(&mut self, call: &Call) {
        match call.path.parts.as_slice() {
            [name] => {
                let bad = self.functions.iter().any(|f| f.locals.iter().any(|l| l.name == name.name && l.kind == LocalKind::Given));
                if !self.is_function(&name.name) && !bad {
                    let visible = self.functions.iter().rev().flat_map(|f| f.fns.iter().map(|(n, _)| &**n));
                    let near = nearest(&name.name, visible.chain(self.known.functions.iter().map(|n| &**n)));
                    let e = Diagnostic::error("E0401", format!("no function is called `{}`", name.name)).label(name.span, "unknown function");
                    self.out.push(match near {
                        Some(near) => e.help(format!("did you mean `{near}`?")),
                        None if let Some(way) = foreign::name(&name.name) => e.help(way),
                        None => e.help("define it above with `fn`; functions of a file imported with `as m` are called `m.name`"),
                    });
                }
                // The text of `error("no {kind}")` names values in braces.
                if &*name.name == "error" {
                    for arg in &call.args {
                        if let ExprKind::Text(text) = &arg.value.kind {
                            for part in text.split('{').skip(1) {
                                if let Some((inner, _)) = part.split_once('}') {
                                    self.name(&inner.trim().into(), arg.value.span);
                                }
                            }
                        }
                    }
                }
            }
            [module, .., last] if !self.known.modules.contains(&module.name) => {
                let e = Diagnostic::error("E0401", format!("no file is imported as `{}`", module.name)).label(call.path.span(), "unknown");
                let is_value = self.functions.iter().any(|f| f.locals.iter().any(|l| l.name == module.name));
                self.out.push(match nearest(&module.name, self.known.modules.iter().map(|n| &**n)) {
                    Some(near) => e.help(format!("did you mean `{near}`?")),
                    None if let Some(way) = foreign::name(&last.name) => e.help(way),
                    None if is_value => e.help(format!("a function takes what it works on: `{}({}, ..)`", last.name, module.name)),
                    None if self.is_function(&last.name) => e.help(format!("the library's functions need no module: `{}(..)`", last.name)),
                    None => e.help(format!("`import \"file.mdl\" as {};` makes a file's functions known", module.name)),
                });
            }
            _ => {}
        }
        self.args(call);
    }

    fn expr(&mut self, expr: &Expr) {
        match &expr.kind {
            ExprKind::Name(name) => self.name(name, expr.span),
            ExprKind::Paren(inner) | ExprKind::Unary { arg: inner, .. } => self.expr(inner),
            ExprKind::List(items) => items.iter().for_each(|e| self.expr(&e.expr)),
            ExprKind::Call(call) => self.call(call),
            ExprKind::Index { base, items } => {
                self.expr(base);
                for (name, index) in items {
                    self.name(&name.name, name.span);
                    self.expr(index);
                }
            }
            ExprKind::Binary { left, right, .. } => {
                self.expr(left);
                self.expr(right);
            }
            ExprKind::Int(..) | ExprKind::Real(..) | ExprKind::Text(_) | ExprKind::Bool(_) | ExprKind::None | ExprKind::Bad => {}
        }
    }
}
