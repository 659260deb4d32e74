//! The `train`, `plan` and `weights` sections.

use super::Elab;
use super::value::{FrameId, Val};
use crate::ast::*;
use crate::names::nearest;
use ir::diag::{Diagnostic, Span};
use ir::model::{Decay, LearningRateSchedule, Muon, MuonScale, Optimizer, Plan, PlanEntry, Train, WeightLine, Weights};
use ir::op::Real;
use ir::pattern;
use std::collections::BTreeSet;
use std::rc::Rc;

/// The contents of the sections.
#[derive(Default)]
pub struct Sections {
    pub train: Train,
    pub plan: Plan,
    pub weights: Vec<Weights>,
    /// Patterns of parameter names, with what they set.
    pub groups: Vec<(String, Group)>,
}

#[derive(Clone, Copy, Default)]
pub struct Group {
    pub lr_scale: Option<Real>,
    pub frozen: Option<bool>,
    pub decay: Option<bool>,
    pub muon: Option<bool>,
}

const AXES: [&str; 7] = ["dp", "tp", "sp", "cp", "ep", "etp", "pp"];
const GROUP: [&str; 4] = ["lr_scale", "frozen", "decay", "muon"];
const TRAIN: [&str; 4] = ["optimizer", "lr", "weight_decay", "clip"];

/// The functions that the plan's `recompute` names; without it, the attention core.
pub fn recomputed(ast: &Ast) -> Vec<Rc<str>> {
    let plans = ast.items.iter().filter_map(|i| if let StmtKind::Plan(block) = &i.kind { Some(&block.stmts) } else { None });
    let lines = plans.flatten().filter_map(|s| if let StmtKind::Setting { path, tiers } = &s.kind { Some((path, tiers)) } else { None });
    let mut named = lines.filter(|(path, _)| path.to_string() == "recompute").map(|(_, tiers)| tiers).peekable();
    if named.peek().is_none() {
        return vec!["attention".into()];
    }
    named.flatten().flatten().filter_map(|e| if let ExprKind::Name(name) = &e.kind { Some(name.clone()) } else { None }).collect()
}

impl Elab<'_> {
    pub fn sections(&mut self, ast: &Ast, model: &Model, frame: FrameId) -> Sections {
        let mut sections = Sections::default();
        let mut seen: Vec<(String, Span)> = vec![];
        let names = crate::resolve::dim_names(ast, model);
        for item in &ast.items {
            let key = match &item.kind {
                StmtKind::Train(_) => "train".to_string(),
                StmtKind::Plan(_) => "plan".to_string(),
                StmtKind::Weights { name, .. } => format!("weights {}", name.name),
                _ => continue,
            };
            if let Some((_, first)) = seen.iter().find(|(k, _)| *k == key) {
                let e = Diagnostic::error("E0503", format!("a second `{key}` section")).label(item.span, "again");
                self.report(e.label(*first, "first one").help("put the settings into one section"));
                continue;
            }
            seen.push((key, item.span));
            match &item.kind {
                StmtKind::Train(block) => {
                    for stmt in &block.stmts {
                        self.train_line(frame, stmt, &mut sections);
                    }
                }
                StmtKind::Plan(block) => {
                    for stmt in &block.stmts {
                        self.plan_line(frame, stmt, &names, &mut sections.plan);
                    }
                }
                StmtKind::Weights { name, block } => {
                    let lines = block.stmts.iter().filter_map(|s| self.weight_line(s, &names)).collect();
                    sections.weights.push(Weights { name: name.name.to_string(), lines });
                }
                _ => {}
            }
        }
        sections
    }

    fn train_line(&mut self, frame: FrameId, stmt: &Stmt, sections: &mut Sections) {
        match &stmt.kind {
            StmtKind::Setting { path, tiers } => {
                let [values] = tiers.as_slice() else {
                    let e = Diagnostic::error("E0503", "`|` opens the next tier of a plan").label(path.span(), "this is `train`");
                    self.report(e);
                    return;
                };
                let [value] = values.as_slice() else {
                    self.report(Diagnostic::error("E0503", format!("`{path}` takes one value")).label(path.span(), "has several"));
                    return;
                };
                self.train_setting(frame, path, value, &mut sections.train);
            }
            StmtKind::Group { patterns, block } => {
                let mut group = Group::default();
                for stmt in &block.stmts {
                    self.group_line(frame, stmt, &mut group);
                }
                for pattern in patterns {
                    if !self.params.iter().any(|p| pattern::matches(&pattern.text, &p.name)) && !self.failed() {
                        let e = Diagnostic::warning("W0503", format!("no parameter is called `{}`", pattern.text));
                        self.report(e.label(pattern.span, "matches nothing").help("`*` stands for any text; iteration numbers may be left out"));
                    }
                    sections.groups.push((pattern.text.to_string(), group));
                }
            }
            _ => {}
        }
    }

    fn failed(&self) -> bool {
        self.diagnostics.iter().any(|d| d.severity == ir::diag::Severity::Error)
    }

    fn group_line(&mut self, frame: FrameId, stmt: &Stmt, group: &mut Group) {
        let StmtKind::Setting { path, tiers } = &stmt.kind else { return };
        let Some(value) = tiers.first().and_then(|t| t.first()) else { return };
        let val = self.eval(frame, value);
        let name = path.to_string();
        match (name.as_str(), &val) {
            (_, Val::Bad) => {}
            ("lr_scale", v) if self.real(v).is_some() => group.lr_scale = self.real(v).map(Real),
            ("frozen", Val::Bool(b)) => group.frozen = Some(*b),
            ("decay", Val::Bool(b)) => group.decay = Some(*b),
            ("muon", Val::Bool(b)) => group.muon = Some(*b),
            ("lr_scale" | "frozen" | "decay" | "muon", other) => {
                let e = Diagnostic::error("E0202", format!("`{name}` of {}", other.kind())).label(value.span, "wrong kind");
                self.report(e.help("`lr_scale: 0.5; frozen: true; decay: false; muon: false;`"));
            }
            _ => {
                let e = Diagnostic::error("E0503", format!("a group has no setting `{name}`")).label(path.span(), "unknown");
                let near = nearest(&name, GROUP).map(|n| format!("did you mean `{n}`?"));
                self.report(e.help(near.unwrap_or_else(|| GROUP.join(", "))));
            }
        }
    }

    fn train_setting(&mut self, frame: FrameId, path: &Path, value: &Expr, train: &mut Train) {
        let name = path.to_string();
        match name.as_str() {
            "optimizer" => {
                if let Some(optimizer) = self.optimizer(frame, value) {
                    train.optimizer = optimizer;
                }
            }
            "lr" => {
                if let Some(schedule) = self.schedule(frame, value) {
                    train.schedule = schedule;
                }
            }
            "weight_decay" => {
                if let Some(x) = self.at_least_zero(frame, value) {
                    train.weight_decay = Real(x);
                }
            }
            "clip" => {
                if let Some(x) = self.at_least_zero(frame, value) {
                    train.clip = ir::fault!("elaborate.train.clip", None, (x > 0.0).then_some(Real(x)));
                }
            }
            _ => {
                let e = Diagnostic::error("E0503", format!("`train` has no setting `{name}`")).label(path.span(), "unknown");
                let near = nearest(&name, TRAIN).map(|n| format!("did you mean `{n}`?"));
                self.report(e.help(near.unwrap_or_else(|| "optimizer, lr, weight_decay, clip, group".into())));
            }
        }
    }

    /// A static number that is not negative.
    fn at_least_zero(&mut self, frame: FrameId, expr: &Expr) -> Option<f64> {
        let val = self.eval(frame, expr);
        match self.real(&val) {
            // Ranks compute with this number in f32.
            Some(x) if x >= 0.0 && (x as f32).is_finite() => Some(x),
            Some(x) => {
                self.report(
                    Diagnostic::error("E0304", format!("{x} is out of range")).label(expr.span, "expected a number from 0 on that f32 holds"),
                );
                None
            }
            None => {
                if !matches!(val, Val::Bad) {
                    let e = Diagnostic::error("E0202", format!("expected a number, this is {}", val.kind())).label(expr.span, val.kind());
                    self.report(e);
                }
                None
            }
        }
    }

    /// A call like `cosine(6e-4, to: 6e-5)`: its name and arguments; the first may be without a name.
    fn parts<'e>(&mut self, expr: &'e Expr, what: &str, choices: &[(&str, &[&'static str])]) -> Option<(&'e Call, Vec<(&'static str, &'e Expr)>)> {
        let usage: Vec<String> = choices.iter().map(|(n, p)| format!("{n}({})", p.join(", "))).collect();
        let ExprKind::Call(call) = &expr.kind else {
            let e = Diagnostic::error("E0503", format!("`{what}` is not written like this")).label(expr.span, "expected a call");
            self.report(e.help(usage.join(" or ")));
            return None;
        };
        let name = call.path.to_string();
        let Some((_, params)) = choices.iter().find(|(n, _)| *n == name) else {
            let e = Diagnostic::error("E0503", format!("`{what}` cannot be `{name}`")).label(call.path.span(), "unknown");
            let near = nearest(&name, choices.iter().map(|c| c.0)).map(|n| format!("did you mean `{n}`?"));
            self.report(e.help(near.unwrap_or_else(|| usage.join(" or "))));
            return None;
        };
        let mut args: Vec<(&'static str, &Expr)> = vec![];
        for (i, arg) in call.args.iter().enumerate() {
            let known = match &arg.name {
                Some(n) => params.iter().find(|p| ***p == *n.name),
                None => params.get(i),
            };
            match known {
                Some(param) if !args.iter().any(|(n, _)| n == param) => args.push((param, &arg.value)),
                _ => {
                    let place = arg.name.as_ref().map_or(arg.value.span, |n| n.span);
                    let e = Diagnostic::error("E0409", format!("`{name}` takes {}", params.join(", "))).label(place, "not one of these");
                    self.report(e);
                    return None;
                }
            }
        }
        Some((call, args))
    }

    fn optimizer(&mut self, frame: FrameId, expr: &Expr) -> Option<Optimizer> {
        let muon: &[&'static str] = &["momentum", "nesterov", "scale", "factor", "iterations", "betas", "eps"];
        let choices: [(&str, &[&'static str]); 4] = [("adamw", &["betas", "eps"]), ("sgd", &["momentum"]), ("lion", &["betas"]), ("muon", muon)];
        let (call, args) = self.parts(expr, "optimizer", &choices)?;
        let of = |name: &str| args.iter().find(|a| a.0 == name).map(|a| a.1);
        let name = call.path.to_string();
        Some(match &*name {
            "sgd" => Optimizer::Sgd { momentum: Real(of("momentum").map_or(Some(0.0), |e| self.at_least_zero(frame, e))?) },
            "lion" => {
                let [beta1, beta2] = self.betas(frame, of("betas"), [0.9, 0.99])?;
                Optimizer::Lion { beta1, beta2 }
            }
            _ => {
                let [beta1, beta2] = self.betas(frame, of("betas"), [0.9, 0.95])?;
                let eps = Real(of("eps").map_or(Some(1e-8), |e| self.at_least_zero(frame, e))?);
                if name == "muon" {
                    let muon = self.muon(frame, of)?;
                    return Some(Optimizer::Muon { muon, beta1, beta2, eps });
                }
                Optimizer::AdamW { beta1, beta2: ir::fault!("elaborate.train.beta", beta1, beta2), eps }
            }
        })
    }

    /// The settings of Muon.
    fn muon<'e>(&mut self, frame: FrameId, of: impl Fn(&str) -> Option<&'e Expr>) -> Option<Muon> {
        let mut muon = Muon::default();
        if let Some(e) = of("momentum") {
            muon.momentum = Real(self.at_least_zero(frame, e)?);
            if muon.momentum.0 >= 1.0 {
                self.report(Diagnostic::error("E0304", format!("momentum = {}", muon.momentum.0)).label(e.span, "expected less than 1"));
                return None;
            }
        }
        if let Some(e) = of("nesterov") {
            muon.nesterov = match self.eval(frame, e) {
                Val::Bool(b) => b,
                other => {
                    self.report(Diagnostic::error("E0202", format!("`nesterov` of {}", other.kind())).label(e.span, "expected a bool"));
                    return None;
                }
            };
        }
        if let Some(e) = of("scale") {
            let val = self.eval(frame, e);
            let named = if let Val::Text(s) = &val { MuonScale::ALL.iter().find(|(name, _)| *name == &**s) } else { None };
            let Some((_, scale)) = named else {
                let names = MuonScale::ALL.map(|(name, _)| format!("\"{name}\"")).join(", ");
                self.report(Diagnostic::error("E0503", "`scale` is no scale of Muon's").label(e.span, "unknown").help(format!("one of {names}")));
                return None;
            };
            muon.scale = *scale;
        }
        if let Some(e) = of("factor") {
            muon.factor = Real(self.at_least_zero(frame, e)?);
        }
        if let Some(e) = of("iterations") {
            let n = self.count(frame, e)?;
            if !(1..=u64::from(Muon::MOST)).contains(&n) {
                let wanted = format!("expected 1 to {}", Muon::MOST);
                self.report(Diagnostic::error("E0304", format!("iterations = {n}")).label(e.span, wanted));
                return None;
            }
            muon.iterations = n as u32;
        }
        Some(muon)
    }

    /// The two decay rates of averages, each less than 1.
    fn betas(&mut self, frame: FrameId, expr: Option<&Expr>, default: [f64; 2]) -> Option<[Real; 2]> {
        let Some(e) = expr else { return Some(default.map(Real)) };
        let unlike = |what: &str| {
            let d = Diagnostic::error("E0503", format!("`betas` are two numbers{what}")).label(e.span, "expected [beta1, beta2]");
            d.help(format!("`betas: [{}, {}]`", default[0], default[1]))
        };
        let ExprKind::List(items) = &e.kind else {
            self.report(unlike(""));
            return None;
        };
        let [first, second] = items.as_slice() else {
            self.report(unlike(&format!(", not {}", items.len())));
            return None;
        };
        let betas = [self.at_least_zero(frame, &first.expr)?, self.at_least_zero(frame, &second.expr)?];
        if let Some((beta, place)) = betas.into_iter().zip([first.expr.span, second.expr.span]).find(|(b, _)| *b >= 1.0) {
            self.report(Diagnostic::error("E0304", format!("beta = {beta}")).label(place, "expected less than 1"));
            return None;
        }
        Some(betas.map(Real))
    }

    fn schedule(&mut self, frame: FrameId, expr: &Expr) -> Option<LearningRateSchedule> {
        let params = |decay: Decay| -> &[&'static str] {
            match decay {
                Decay::Constant => &["peak", "warmup"],
                Decay::InverseSquareRoot => &["peak", "to", "warmup", "steps", "constant"],
                _ => &["peak", "to", "warmup", "steps", "falling", "constant"],
            }
        };
        let (call, args) = self.parts(expr, "lr", &Decay::ALL.map(|(name, decay)| (name, params(decay))))?;
        let name = call.path.to_string();
        let (_, decay) = Decay::ALL.into_iter().find(|(n, _)| *n == name).expect("invariant: `parts` takes no other name");
        let mut schedule = LearningRateSchedule { decay, peak: Real(0.0), min: Real(0.0), warmup: 0, steps: 0, falling: None, constant: 0 };
        let (mut peak, mut steps) = (None, None);
        for (name, e) in args {
            match name {
                "peak" => peak = Some(self.at_least_zero(frame, e)?),
                "to" => schedule.min = Real(self.at_least_zero(frame, e)?),
                "warmup" => schedule.warmup = ir::fault!("elaborate.train.warmup", 0, self.count(frame, e)?),
                "steps" => steps = Some(self.count(frame, e)?),
                "constant" => schedule.constant = self.count(frame, e)?,
                _ => schedule.falling = Some(self.count(frame, e)?),
            }
        }
        let Some(peak) = peak else {
            self.report(Diagnostic::error("E0409", "a schedule needs its highest rate").label(expr.span, "lacks it").help("`cosine(6e-4, ..)`"));
            return None;
        };
        if decay != Decay::Constant && steps.is_none() {
            let e = Diagnostic::error("E0409", "a schedule that decays needs its number of steps").label(expr.span, "lacks `steps`");
            self.report(e.help("`cosine(6e-4, to: 6e-5, warmup: 2000, steps: 600_000)`"));
            return None;
        }
        schedule.peak = Real(peak);
        schedule.steps = steps.unwrap_or(0);
        Some(schedule)
    }

    fn count(&mut self, frame: FrameId, expr: &Expr) -> Option<u64> {
        let val = self.eval(frame, expr);
        match self.int(&val).and_then(|n| u64::try_from(n).ok()) {
            Some(n) => Some(n),
            None => {
                if !matches!(val, Val::Bad) {
                    let shown = self.shown(&val);
                    self.report(
                        Diagnostic::error("E0202", format!("{shown} is not a number of steps")).label(expr.span, "expected an int from 0 on"),
                    );
                }
                None
            }
        }
    }

    /// The functions that a plan can name: those in sight of the model, those that were called, and names of calls.
    fn functions_from(&self, frame: FrameId) -> BTreeSet<Rc<str>> {
        let mut out = self.called.clone();
        let mut at = Some(frame);
        while let Some(id) = at {
            let frame = &self.frames[id.0];
            out.extend(frame.fns.keys().cloned());
            out.extend(frame.modules.values().flat_map(|m| self.frames[m.0].fns.keys().cloned()));
            at = frame.parent;
        }
        out
    }

    /// Checks that what the command line names for recomputation or offloading is called.
    pub fn check_named(&mut self) {
        let asked = self.options.recompute.iter().flatten().map(|name| (name, "recomputed"));
        let asked = asked.chain(self.options.offload.iter().map(|name| (name, "offloaded")));
        let unknown: Vec<(&String, &str)> = asked.filter(|(name, _)| !self.called.contains(name.as_str())).collect();
        for (name, done) in unknown {
            let e = Diagnostic::error("E0504", format!("nothing that the model calls is `{name}`, which is to be {done}"));
            let near = nearest(name, self.called.iter().map(|n| &**n)).map(|n| format!("did you mean `{n}`?"));
            self.report(e.help(near.unwrap_or_else(|| "name functions that the text calls, or what calls are named: `.. as mlp`".into())));
        }
    }

    fn plan_line(&mut self, frame: FrameId, stmt: &Stmt, dims: &[Rc<str>], plan: &mut Plan) {
        let StmtKind::Setting { path, tiers } = &stmt.kind else { return };
        let axis = path.to_string();
        let of_functions = axis == "recompute";
        let last = &path.parts[path.parts.len() - 1];
        if !of_functions && !AXES.contains(&&*last.name) {
            let e = Diagnostic::error("E0504", format!("no axis is called `{}`", last.name)).label(last.span, "unknown");
            let near = nearest(&last.name, AXES).map(|n| format!("did you mean `{n}`?"));
            self.report(e.help(near.unwrap_or_else(|| "dp, tp, sp, cp, ep, etp, pp, or `recompute`".into())));
            return;
        }
        if let Some(first) = plan.get(&axis).and_then(|e| e.span) {
            let e = Diagnostic::error("E0504", format!("`{axis}` is planned twice")).label(stmt.span, "again").label(first, "first time");
            self.report(e.help("put the dims into one list"));
            return;
        }
        let functions = self.functions_from(frame);
        let mut names = vec![];
        for tier in tiers {
            let mut list: Vec<String> = vec![];
            for expr in tier {
                let ExprKind::Name(name) = &expr.kind else {
                    let e = Diagnostic::error("E0504", "a plan lists names").label(expr.span, "not a name");
                    self.report(e.help("`tp: heads, ffn, vocab;`"));
                    continue;
                };
                if !of_functions && !dims.contains(name) {
                    let e = Diagnostic::error("E0504", format!("the model has no dim `{name}`")).label(expr.span, "unknown dim");
                    self.report(match nearest(name, dims.iter().map(|n| &**n)) {
                        Some(near) => e.help(format!("did you mean `{near}`?")),
                        None => e.help("a plan names dims of the model: settings that are ints, and `dim`s"),
                    });
                    continue;
                }
                if of_functions && !functions.contains(name) {
                    let e = Diagnostic::error("E0504", format!("no function is called `{name}`")).label(expr.span, "unknown function");
                    self.report(match nearest(name, functions.iter().map(|n| &**n)) {
                        Some(near) => e.help(format!("did you mean `{near}`?")),
                        None => e.help("`recompute` lists functions whose values the backward pass computes again: `recompute: attention;`"),
                    });
                    continue;
                }
                list.push(name.to_string());
            }
            names.push(list);
        }
        plan.entries.push(PlanEntry { axis, tiers: names, span: Some(stmt.span) });
    }

    fn weight_line(&mut self, stmt: &Stmt, dims: &[Rc<str>]) -> Option<WeightLine> {
        let StmtKind::Weight { paths, template, copies, layout } = &stmt.kind else { return None };
        let layout = layout.as_ref().map(|products| products.iter().map(|p| self.product(p, dims)).collect());
        let (params, copies) = (paths.iter().map(Path::to_string).collect(), copies.iter().map(|c| c.text.to_string()).collect());
        Some(WeightLine { params, template: template.text.to_string(), copies, layout, span: Some(stmt.span) })
    }

    fn product(&mut self, product: &Product, dims: &[Rc<str>]) -> ir::model::Product {
        product
            .atoms
            .iter()
            .map(|atom| match atom {
                Atom::Dim(name) => {
                    if !dims.contains(&name.name) {
                        let e = Diagnostic::error("E0505", format!("the model has no dim `{}`", name.name)).label(name.span, "unknown dim");
                        self.report(match nearest(&name.name, dims.iter().map(|n| &**n)) {
                            Some(near) => e.help(format!("did you mean `{near}`?")),
                            None => e.help("the layout of a foreign tensor names dims of the model"),
                        });
                    }
                    ir::model::Atom::Dim(name.name.to_string())
                }
                Atom::Choice(parts) => ir::model::Atom::Parts(parts.iter().map(|p| self.product(p, dims)).collect()),
            })
            .collect()
    }
}
