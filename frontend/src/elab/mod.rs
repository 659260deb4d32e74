//! Elaboration: the tree is evaluated once; what is static disappears, functions are inlined, repeats unrolled, and
//! the tensor operations that remain are the logical forward graph.

mod attention;
mod call;
mod experts;
mod expr;
mod finish;
mod number;
mod prims;
mod sections;
mod settings;
mod stmt;
mod storage;
mod structure;
mod tensor;
mod value;

pub use prims::PRIMITIVES;

use crate::Options;
use crate::ast::{Ast, Function, Ident, StmtKind};
use crate::imports::{Imports, Link};
use ir::diag::{Diagnostic, Severity, Span};
use ir::graph::{Body, Input, Origin, Param, Phase, Report, Update};
use ir::model::Model;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use value::{DimEntry, DimId, Frame, FrameId, Val, Var};

/// The most calls inside calls.
pub const MAX_CALLS: usize = 64;
/// The most operations of a graph.
const MAX_OPS: usize = 1_000_000;
/// The most elements of a dim, of a tensor and of all parameters: far beyond any machine, and far from overflow.
const MAX_DIM: i64 = 1 << 40;
const MAX_ELEMENTS: u64 = 1 << 53;
const MAX_PARAMETERS: u64 = 1 << 50;
/// The most expressions and statements that are evaluated, so that static loops end too.
const MAX_WORK: usize = 5_000_000;
pub const MAX_DIAGNOSTICS: usize = 200;
/// Stack that one level of evaluation may need, and how much more is taken when less is left.
const RED_ZONE: usize = 256 * 1024;
const MORE_STACK: usize = 4 * 1024 * 1024;

/// An elaborated text: the model and the warnings about it.
#[derive(Clone, Debug)]
pub struct Elaborated {
    /// The graph, the values of settings, and what the sections say.
    pub model: Model,
    /// In the order in which they were found; no error is among them.
    pub warnings: Vec<Diagnostic>,
}

/// Everything that is known while a model is evaluated.
pub struct Elab<'a> {
    options: &'a Options,
    /// First file of the library in the sources; spans from there on are shown at the user's call.
    std_files: std::ops::Range<u16>,
    body: Body,
    params: Vec<Param>,
    param_spans: BTreeMap<String, Span>,
    param_elements: u64,
    inputs: Vec<Input>,
    losses: Vec<Report>,
    metrics: Vec<Report>,
    /// The declaration of each metric, and the first of each loss.
    report_spans: BTreeMap<String, Span>,
    outputs: Vec<Report>,
    updates: Vec<Update>,
    dims: Vec<DimEntry>,
    /// The declaration of each dim of the graph.
    declared: Vec<DimId>,
    frames: Vec<Frame>,
    segments: Vec<Rc<str>>,
    /// Whether the text, beside the library, asks if it trains, or draws random numbers.
    asks_training: bool,
    /// Draws made per scope, to tell their keys apart.
    draws: BTreeMap<Arc<str>, u32>,
    origin: Origin,
    layers: u32,
    /// The innermost call in the user's text, and the calls around it.
    user_span: Option<Span>,
    /// The function of the library that the user's text calls there with several arguments by position.
    user_call: Option<Rc<Function>>,
    calls: Vec<Rc<str>>,
    /// Functions and named calls whose values the backward pass may recompute, and the names of all that was called.
    recomputed: Vec<Rc<str>>,
    called: BTreeSet<Rc<str>>,
    diagnostics: Vec<Diagnostic>,
    seen: HashSet<(String, Span)>,
    /// Errors met, repeated ones too: tells whether an evaluation failed.
    failures: usize,
    work: usize,
    stopped: bool,
}

/// Evaluates the model of a file. `errors` are those of parsing and name resolution; they come first in the result.
///
/// # Errors
/// Everything that is wrong, in the order of the text.
pub fn elaborate(ast: &Ast, imports: &Imports, library: &[Ast], options: &Options, errors: Vec<Diagnostic>) -> Result<Elaborated, Vec<Diagnostic>> {
    let first = library.first().map_or(u16::MAX, |a| a.file);
    let mut elab = Elab {
        options,
        std_files: first..first.saturating_add(library.len() as u16),
        body: Body::default(),
        params: vec![],
        param_spans: BTreeMap::new(),
        param_elements: 0,
        inputs: vec![],
        losses: vec![],
        metrics: vec![],
        report_spans: BTreeMap::new(),
        outputs: vec![],
        updates: vec![],
        dims: vec![],
        declared: vec![],
        frames: vec![],
        segments: vec![],
        asks_training: false,
        draws: BTreeMap::new(),
        origin: Origin::new(Phase::Forward),
        layers: 0,
        user_span: None,
        user_call: None,
        calls: vec![],
        recomputed: options.recompute.as_ref().map_or_else(|| sections::recomputed(ast), |names| names.iter().map(|n| n.as_str().into()).collect()),
        called: BTreeSet::new(),
        diagnostics: vec![],
        seen: HashSet::new(),
        failures: 0,
        work: 0,
        stopped: false,
    };
    for error in errors {
        elab.report(error);
    }
    let std_frame = elab.library(library);
    let mut modules = vec![];
    for file in &imports.files {
        modules.push(elab.file(&file.ast, &file.links, &modules, std_frame));
    }
    let file_frame = elab.file(ast, &imports.links, &modules, std_frame);
    let models = ast.items.iter().filter_map(|i| if let StmtKind::Model(m) = &i.kind { Some(m) } else { None });
    let mut settings = vec![];
    let mut sections = sections::Sections::default();
    let mut name = None;
    let mut batch = None;
    if let Some(model) = models.into_iter().next() {
        name = Some(&model.name);
        let frame = elab.frame(Some(file_frame));
        settings = elab.settings(model, frame);
        batch = elab.frames[frame.0].vars.get("batch").map(|v| v.val.clone());
        elab.exec_block(frame, &model.body.stmts);
        if !elab.stopped {
            sections = elab.sections(ast, model, frame);
            elab.check_named();
        }
    }
    elab.finish(name, batch, settings, sections)
}

impl Elab<'_> {
    fn frame(&mut self, parent: Option<FrameId>) -> FrameId {
        self.frames.push(Frame { parent, ..Frame::default() });
        FrameId(self.frames.len() - 1)
    }

    /// The outermost scope: constants and the library.
    fn library(&mut self, library: &[Ast]) -> FrameId {
        let frame = self.frame(None);
        let span = Span { file: 0, line: 1, col: 1, len: 0 };
        let constants = [("pi", Val::Real(std::f64::consts::PI)), ("inf", Val::Real(f64::INFINITY)), ("training", Val::Bool(self.options.training))];
        for (name, val) in constants {
            self.frames[frame.0].vars.insert(name.into(), Var { val, span, changed: None });
        }
        for ast in library {
            self.functions(ast, frame);
        }
        frame
    }

    /// The scope of a file: its functions, within a scope of what it imports from files that have theirs in
    /// `modules`.
    fn file(&mut self, ast: &Ast, links: &[Link], modules: &[FrameId], std_frame: FrameId) -> FrameId {
        let around = self.frame(Some(std_frame));
        for link in links {
            let module = modules[link.file];
            match &link.alias {
                Some(alias) => {
                    self.frames[around.0].modules.insert(alias.name.clone(), module);
                }
                None => {
                    let fns: Vec<_> = self.frames[module.0].fns.iter().map(|(n, c)| (n.clone(), c.clone())).collect();
                    for (name, closure) in fns {
                        self.frames[around.0].fns.entry(name).or_insert(closure);
                    }
                }
            }
        }
        let frame = self.frame(Some(around));
        self.functions(ast, frame);
        frame
    }

    fn functions(&mut self, ast: &Ast, frame: FrameId) {
        for item in &ast.items {
            if let StmtKind::Fn(function) = &item.kind {
                let closure = value::Closure { function: function.clone(), env: frame };
                self.frames[frame.0].fns.insert(function.name.name.clone(), closure);
            }
        }
    }

    fn in_library(&self, span: Span) -> bool {
        self.std_files.contains(&span.file)
    }

    /// Adds an error. One whose place is in the library is shown at the user's call; one that was reported before is
    /// dropped.
    fn report(&mut self, mut diagnostic: Diagnostic) {
        self.failures += usize::from(diagnostic.severity == Severity::Error);
        if let Some(first) = diagnostic.labels.first().map(|l| l.span)
            && self.in_library(first)
            && let Some(user) = self.user_span
        {
            diagnostic.labels.insert(0, ir::diag::Label { span: user, text: "in this call".into() });
        }
        if let Some(function) = self.user_call.as_ref().filter(|_| diagnostic.severity == Severity::Error) {
            let (taken, optional): (Vec<_>, Vec<_>) = function.params.iter().partition(|p| p.default.is_none());
            let mut names: Vec<&str> = taken.iter().map(|p| &*p.name.name).collect();
            names.extend((!optional.is_empty()).then_some(".."));
            diagnostic.help.push(format!("`{}({})` is the order of its arguments", function.name.name, names.join(", ")).into());
        }
        let span = diagnostic.labels.first().map_or(Span { file: u16::MAX, line: 0, col: 0, len: 0 }, |l| l.span);
        // Name resolution says more about a name than evaluation can, so its codes count as the same error.
        let code = if matches!(diagnostic.code.as_str(), "E0404" | "E0405") { "E0401" } else { &diagnostic.code };
        let key = if diagnostic.labels.is_empty() { diagnostic.message.clone() } else { code.to_string() };
        if self.stopped || !self.seen.insert((key, span)) {
            return;
        }
        let errors = self.diagnostics.iter().filter(|d| d.severity == Severity::Error).count();
        self.diagnostics.push(diagnostic);
        if errors + 1 >= MAX_DIAGNOSTICS {
            let e = Diagnostic::error("E0905", format!("stopped after {MAX_DIAGNOSTICS} errors"));
            self.diagnostics.push(e.help("fix the first ones; the others may follow from them"));
            self.stopped = true;
        }
    }

    fn fail(&mut self, diagnostic: Diagnostic) -> Val {
        self.report(diagnostic);
        Val::Bad
    }

    /// Reports an error after which nothing is elaborated any more.
    fn stop(&mut self, diagnostic: Diagnostic) {
        self.report(diagnostic);
        self.stopped = true;
    }

    /// Counts a step of evaluation. Returns false if there were too many.
    fn step(&mut self, span: Span) -> bool {
        self.work += 1;
        if self.work > MAX_WORK && !self.stopped {
            let e = Diagnostic::error("E0902", format!("the text needs more than {MAX_WORK} steps to elaborate"));
            self.stop(e.label(span, "stopped here").help("look for a `repeat` with a very large count"));
        }
        !self.stopped
    }

    fn lookup(&self, frame: FrameId, name: &str) -> Option<&Var> {
        let mut at = Some(frame);
        while let Some(id) = at {
            let frame = &self.frames[id.0];
            if let Some(var) = frame.vars.get(name) {
                return Some(var);
            }
            at = frame.parent;
        }
        None
    }

    /// All names of values visible from a frame, for suggestions.
    fn visible(&self, frame: FrameId) -> Vec<Rc<str>> {
        let mut names = vec![];
        let mut at = Some(frame);
        while let Some(id) = at {
            names.extend(self.frames[id.0].vars.keys().cloned());
            at = self.frames[id.0].parent;
        }
        names.sort();
        names
    }

    fn declare(&mut self, frame: FrameId, name: &Ident, val: Val) {
        if &*name.name != "_" {
            let frame = &mut self.frames[frame.0];
            let first = frame.vars.insert(name.name.clone(), Var { val, span: name.span, changed: None });
            // A second declaration was reported when names were resolved; the first one stays responsible.
            if first.is_none() {
                frame.declared.push(name.name.clone());
            }
        }
    }

    fn scope(&self) -> Arc<str> {
        self.segments.join(".").into()
    }

    fn in_segment<T>(&mut self, segments: &[Rc<str>], work: impl FnOnce(&mut Self) -> T) -> T {
        if segments.is_empty() {
            return work(self);
        }
        let outer = self.segments.len();
        self.segments.extend_from_slice(segments);
        let scope = self.scope();
        let before = std::mem::replace(&mut self.origin.scope, scope);
        let result = work(self);
        self.segments.truncate(outer);
        self.origin.scope = before;
        result
    }
}
