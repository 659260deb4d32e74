//! The `weights` section of a model text, applied: which foreign tensors there are, and where in them each parameter
//! lies.

use ir::diag::{Diagnostic, Span};
use ir::dim::Dim;
use ir::graph::{Graph, Param};
use ir::model::{Atom, Model, Product, WeightLine};
use std::collections::{BTreeMap, HashMap};

/// A foreign tensor and everything in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Foreign {
    pub name: String,
    /// Elements, outermost first; row-major and dense, as all strides here.
    pub shape: Vec<u64>,
    pub parts: Vec<ParamSlice>,
    /// Names under which a checkpoint holds it once more.
    pub copies: Vec<String>,
}

/// A parameter, or a slice of one, within a foreign tensor: a nest of loops over both.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSlice {
    /// Number of the parameter in the graph.
    pub param: usize,
    /// The first element, in the parameter and in the foreign tensor.
    pub own: u64,
    pub foreign: u64,
    pub loops: Vec<Loop>,
}

/// One dim: its size and its strides in the parameter and in the foreign tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loop {
    pub size: u64,
    pub own: u64,
    pub foreign: u64,
}

/// The foreign tensors of a model, in the order of the section; together they hold every element of every parameter
/// once.
///
/// # Errors
/// Parameters without a line or with several; lines that contradict the parameters they name.
pub fn foreign(section: &str, model: &Model) -> Result<Vec<Foreign>, Vec<Diagnostic>> {
    let Some(weights) = model.weights.iter().find(|w| w.name == section) else {
        let e = Diagnostic::error("E0505", format!("model `{}` has no section `weights {section}`", model.graph.name));
        return Err(vec![e.help("it says how foreign tensors are named: `weights hf { embed = \"model.embed_tokens.weight\"; }`")]);
    };
    let (paths, lines) = (paths(&model.graph), HashMap::new());
    let mut resolver = LayoutResolver { graph: &model.graph, settings: &model.settings, paths, lines, idle: vec![], found: vec![], errors: vec![] };
    for line in &weights.lines {
        if let Err(e) = resolver.line(line) {
            resolver.errors.push(*e);
        }
    }
    resolver.finish()
}

/// What is wrong with a model's `weights` sections, which only imports and exports read.
pub fn mistakes(model: &Model) -> Vec<Diagnostic> {
    model.weights.iter().filter_map(|w| foreign(&w.name, model).err()).flatten().collect()
}

/// A parameter's name without iteration numbers, and the numbers by the segment before each.
fn split(name: &str) -> (String, Vec<(String, u64)>) {
    let (mut path, mut numbers): (Vec<&str>, Vec<(String, u64)>) = (vec![], vec![]);
    for segment in name.split('.') {
        match (segment.parse(), path.last()) {
            (Ok(number), Some(last)) => numbers.push(((*last).to_owned(), number)),
            _ => path.push(segment),
        }
    }
    (path.join("."), numbers)
}

/// Parameters by path, with their iteration numbers.
type Paths = BTreeMap<String, Vec<(usize, Vec<(String, u64)>)>>;

fn paths(graph: &Graph) -> Paths {
    let mut out = Paths::new();
    for (i, param) in graph.params.iter().enumerate() {
        let (path, numbers) = split(&param.name);
        out.entry(path).or_default().push((i, numbers));
    }
    out
}

struct LayoutResolver<'a> {
    graph: &'a Graph,
    settings: &'a [(String, String)],
    paths: Paths,
    /// The line of each parameter that has one.
    lines: HashMap<usize, Option<Span>>,
    /// Parameters of lines that name none of this model, as settings may have others.
    idle: Vec<String>,
    found: Vec<Foreign>,
    errors: Vec<Diagnostic>,
}

fn error(line: &WeightLine, message: impl Into<String>) -> Box<Diagnostic> {
    let e = Diagnostic::error("E0505", message);
    Box::new(match line.span {
        Some(span) => e.label(span, "in this line"),
        None => e,
    })
}

fn helped(line: &WeightLine, message: impl Into<String>, help: impl Into<String>) -> Box<Diagnostic> {
    Box::new(error(line, message).help(help))
}

impl LayoutResolver<'_> {
    fn finish(mut self) -> Result<Vec<Foreign>, Vec<Diagnostic>> {
        let mut named: Vec<String> = vec![];
        for (i, param) in self.graph.params.iter().enumerate() {
            let path = split(&param.name).0;
            // A wrong line leaves its parameters without one, so missing lines count only if there are no errors.
            if self.errors.is_empty() && !self.lines.contains_key(&i) && !named.contains(&path) {
                named.push(path);
            }
        }
        for path in named {
            let e = Diagnostic::error("E0505", format!("parameter `{path}` has no line in the `weights` section"));
            let span = self.paths[&path].first().and_then(|(i, _)| self.graph.params[*i].span);
            let e = match frontend::names::nearest(&path, self.idle.iter().map(String::as_str)) {
                Some(idle) => e.help(format!("no parameter is called `{idle}`, which has a line: did you mean this one?")),
                None => e,
            };
            self.errors.push(match span {
                Some(span) => e.label(span, "this parameter"),
                None => e,
            });
        }
        let mut names: Vec<&str> = self.found.iter().flat_map(|f| [&f.name].into_iter().chain(&f.copies)).map(String::as_str).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            self.errors.push(Diagnostic::error("E0505", format!("two lines name the tensor \"{}\"", twice[0])));
        }
        if self.errors.is_empty() { Ok(self.found) } else { Err(self.errors) }
    }

    /// All tensors of a line: one per iteration.
    fn line(&mut self, line: &WeightLine) -> Result<(), Box<Diagnostic>> {
        let groups: Vec<_> = line.params.iter().map(|p| self.paths.get(p).cloned().unwrap_or_default()).collect();
        if groups.iter().all(Vec::is_empty) {
            self.idle.extend(line.params.iter().cloned());
            return Ok(());
        }
        if let Some(lacking) = groups.iter().position(Vec::is_empty) {
            return Err(error(line, format!("this configuration has no parameter `{}`, but others of the line", line.params[lacking])));
        }
        for (first, numbers) in &groups[0] {
            let mut params = vec![*first];
            for (group, path) in groups.iter().zip(&line.params).skip(1) {
                let same = group.iter().find(|(_, n)| n == numbers).map(|(i, _)| *i);
                let lacking = || error(line, format!("`{path}` has no iteration that goes with `{}`", self.graph.params[*first].name));
                params.push(same.ok_or_else(lacking)?);
            }
            for param in &params {
                if self.lines.insert(*param, line.span).is_some() {
                    return Err(error(line, format!("parameter `{}` has two lines", self.graph.params[*param].name)));
                }
            }
            self.tensors(line, &params, numbers)?;
        }
        Ok(())
    }

    /// The tensors of one iteration: one, or one per index of the dims in the template.
    fn tensors(&mut self, line: &WeightLine, params: &[usize], numbers: &[(String, u64)]) -> Result<(), Box<Diagnostic>> {
        let views: Vec<View<'_>> = params.iter().map(|p| View::new(self.graph, *p)).collect();
        let template = self.template(line, &line.template, numbers)?;
        let mut indexed: Vec<(String, u64)> = vec![];
        for hole in template.placeholders.iter().filter(|h| numbers.iter().all(|(segment, _)| *segment != h.count)) {
            let size = size_of(&views, &hole.count);
            let size = size.ok_or_else(|| {
                error(line, format!("`{{{}}}` is neither a repeat around `{}` nor a dim of it", hole.count, line.params.join("`, `")))
            })?;
            if indexed.iter().all(|(n, _)| *n != hole.count) {
                indexed.push((hole.count.clone(), size));
            }
        }
        // A copy's template has the placeholders of its tensor, and may have those of other repeats: each iteration
        // of these gives a copy.
        let mut copies = vec![];
        for text in &line.copies {
            let copy = self.template(line, text, numbers)?;
            let other = |h: &&Placeholder| numbers.iter().chain(&indexed).all(|(name, _)| *name != h.count);
            let mut further: Vec<(String, u64)> =
                copy.placeholders.iter().filter(other).map(|h| (h.count.clone(), self.iterations(&h.count))).collect();
            further.dedup();
            copies.push((copy, further));
        }
        let shape = Shape::new(line, &views, &indexed)?;
        for at in indices(&indexed) {
            let known = [numbers, &at].concat();
            let named = |(copy, further): &(Template, Vec<_>)| indices(further).map(|i| copy.filled(&[&known[..], &i].concat())).collect::<Vec<_>>();
            let parts = views.iter().enumerate().map(|(k, view)| shape.part(k, view, &at)).collect();
            let copies = copies.iter().flat_map(named).collect();
            self.found.push(Foreign { name: template.filled(&known), shape: shape.sizes(), parts, copies });
        }
        Ok(())
    }

    /// How often a repeat of this name runs; 0: there is none.
    fn iterations(&self, name: &str) -> u64 {
        let numbers = self.paths.values().flatten().flat_map(|(_, numbers)| numbers);
        numbers.filter(|(segment, _)| segment == name).map(|(_, number)| number + 1).max().unwrap_or(0)
    }

    /// A template of parameters with these iteration numbers.
    fn template(&self, line: &WeightLine, text: &str, numbers: &[(String, u64)]) -> Result<Template, Box<Diagnostic>> {
        let mut template = Template { text: text.to_owned(), placeholders: vec![] };
        for rest in text.split('{').skip(1) {
            let (hole, _) = rest.split_once('}').ok_or_else(|| error(line, format!("\"{text}\" has an open brace")))?;
            let (first, count) = match hole.split_once('+') {
                None => (0, hole),
                Some((setting, count)) => {
                    let found = self.settings.iter().find(|(name, _)| name == setting.trim()).and_then(|(_, value)| value.parse::<u64>().ok());
                    let unknown = || {
                        let message = format!("`{{{hole}}}` counts on from `{}`, which is no setting that is a whole number", setting.trim());
                        helped(line, message, "a setting, then what counts: `{layers + further}`")
                    };
                    (found.filter(|n| *n <= u64::from(u32::MAX)).ok_or_else(unknown)?, count.trim())
                }
            };
            template.placeholders.push(Placeholder { text: hole.to_owned(), first, count: count.to_owned() });
        }
        if let Some((segment, _)) = numbers.iter().find(|(segment, _)| template.placeholders.iter().all(|h| h.count != *segment)) {
            let message = format!("\"{text}\" is one tensor for all iterations of `{segment}`");
            return Err(helped(line, message, format!("put `{{{segment}}}` where the iteration's number stands")));
        }
        Ok(template)
    }
}

/// A name with placeholders.
struct Template {
    text: String,
    placeholders: Vec<Placeholder>,
}

/// A placeholder in braces: `{count}`, or `{setting + count}`.
struct Placeholder {
    text: String,
    /// Number of the first iteration.
    first: u64,
    /// The repeat or dim that counts.
    count: String,
}

impl Template {
    /// The name at a number of each repeat and dim.
    fn filled(&self, at: &[(String, u64)]) -> String {
        let mut name = self.text.clone();
        for hole in &self.placeholders {
            let number =
                at.iter().find(|(n, _)| *n == hole.count).map_or(0, |(_, number)| ir::fault!("convert.layout.first", 0, hole.first) + number);
            name = name.replace(&format!("{{{}}}", hole.text), &number.to_string());
        }
        name
    }
}

/// All indices of dims of these sizes, the last one fastest.
fn indices(sizes: &[(String, u64)]) -> impl Iterator<Item = Vec<(String, u64)>> + '_ {
    (0..sizes.iter().map(|(_, size)| size).product()).map(move |mut index: u64| {
        let mut at: Vec<(String, u64)> = vec![];
        for (name, size) in sizes.iter().rev() {
            at.push((name.clone(), index % size));
            index /= size;
        }
        at
    })
}

/// The size of a dim that all of them have.
fn size_of(views: &[View<'_>], dim: &str) -> Option<u64> {
    let sizes = views.iter().map(|v| v.dim(dim).map(|d| d.0)).collect::<Option<Vec<u64>>>()?;
    sizes.first().copied().filter(|first| sizes.iter().all(|s| s == first))
}

/// A parameter's dims by name: sizes and dense strides.
struct View<'a> {
    number: usize,
    param: &'a Param,
    dims: Vec<(&'a str, u64, u64)>,
}

impl<'a> View<'a> {
    fn new(graph: &'a Graph, number: usize) -> View<'a> {
        let param = &graph.params[number];
        let stride = |k: usize| graph.body.dims.elements(&param.ty.dims[k + 1..]);
        let dim = |(k, d): (usize, &Dim)| (graph.body.dims.name(*d), graph.body.dims.size(*d), stride(k));
        View { number, param, dims: param.ty.dims.iter().enumerate().map(dim).collect() }
    }

    /// Size and stride of a dim, if there is exactly one of this name.
    fn dim(&self, name: &str) -> Option<(u64, u64)> {
        let mut found = self.dims.iter().filter(|(n, ..)| *n == name);
        let (_, size, stride) = found.next()?;
        found.next().is_none().then_some((*size, *stride))
    }
}

/// A merged dim of a foreign tensor, with sizes.
type Merged = Vec<Factor>;

enum Factor {
    Dim {
        name: String,
        size: u64,
    },
    /// One alternative per parameter, end to end.
    Parts(Vec<Vec<(String, u64)>>),
}

impl Factor {
    fn size(&self) -> u64 {
        match self {
            Factor::Dim { size, .. } => *size,
            Factor::Parts(parts) => parts.iter().map(|p| product(p)).sum(),
        }
    }
}

fn product(dims: &[(String, u64)]) -> u64 {
    dims.iter().map(|(_, size)| size).product()
}

/// The layout of a line's tensors.
struct Shape {
    dims: Vec<Merged>,
}

impl Shape {
    fn new(line: &WeightLine, views: &[View<'_>], indexed: &[(String, u64)]) -> Result<Shape, Box<Diagnostic>> {
        let declared: Vec<Product>;
        let layout = match &line.layout {
            Some(layout) => layout,
            None => {
                let rest = views[0].dims.iter().filter(|(name, ..)| indexed.iter().all(|(n, _)| n != name));
                declared = rest.map(|(name, ..)| vec![Atom::Dim((*name).to_owned())]).collect();
                &declared
            }
        };
        let choices = layout.iter().flatten().filter(|a| matches!(a, Atom::Parts(_))).count();
        if choices != usize::from(views.len() > 1) {
            let message = match choices {
                0 => format!("{} parameters in one tensor, and no layout that says where each is", views.len()),
                _ => format!("{choices} groups of alternatives for {} parameter(s)", views.len()),
            };
            return Err(helped(line, message, "`a, b = \"..\" [(x | y), z];` concatenates along the first dim"));
        }
        // Names are checked before sizes: the layout has to name each dim of a parameter exactly once.
        for (k, view) in views.iter().enumerate() {
            let mut names: Vec<&str> = vec![];
            for atom in layout.iter().flatten() {
                match atom {
                    Atom::Dim(name) => names.push(name),
                    Atom::Parts(parts) if parts.len() != views.len() => {
                        return Err(error(line, format!("{} alternatives for {} parameters", parts.len(), views.len())));
                    }
                    Atom::Parts(parts) => {
                        for atom in &parts[k] {
                            match atom {
                                Atom::Dim(name) => names.push(name),
                                Atom::Parts(_) => return Err(error(line, "alternatives inside of alternatives")),
                            }
                        }
                    }
                }
            }
            let mut want: Vec<&str> = view.dims.iter().map(|d| d.0).filter(|name| indexed.iter().all(|(n, _)| n != name)).collect();
            let shown = format!("the layout has [{}], `{}` has [{}]", names.join(", "), view.param.name, want.join(", "));
            names.sort_unstable();
            want.sort_unstable();
            if names != want || want.windows(2).any(|w| w[0] == w[1]) {
                return Err(helped(line, shown, "a layout names every dim of a parameter once; `a*b` merges dims"));
            }
        }
        let size = |name: &str, view: &View<'_>| view.dim(name).map_or(0, |d| d.0);
        let mut dims = vec![];
        for merged in layout {
            let mut factors = vec![];
            for atom in merged {
                factors.push(match atom {
                    Atom::Dim(name) => {
                        let first = size(name, &views[0]);
                        if let Some(other) = views.iter().find(|v| size(name, v) != first) {
                            let (a, b) = (&views[0].param.name, &other.param.name);
                            return Err(error(line, format!("`{name}` is {first} in `{a}` and {} in `{b}`", size(name, other))));
                        }
                        Factor::Dim { name: name.clone(), size: first }
                    }
                    Atom::Parts(parts) => Factor::Parts(
                        parts
                            .iter()
                            .zip(views)
                            .map(|(part, view)| {
                                let dim = |atom: &Atom| match atom {
                                    Atom::Dim(name) => Some((name.clone(), size(name, view))),
                                    Atom::Parts(_) => None,
                                };
                                part.iter().filter_map(dim).collect()
                            })
                            .collect(),
                    ),
                });
            }
            dims.push(factors);
        }
        Ok(Shape { dims })
    }

    fn sizes(&self) -> Vec<u64> {
        self.dims.iter().map(|d| d.iter().map(Factor::size).product()).collect()
    }

    /// Where the `k`th parameter of the line lies, at an index of the dims in the template.
    fn part(&self, k: usize, view: &View<'_>, at: &[(String, u64)]) -> ParamSlice {
        let own = at.iter().map(|(name, i)| view.dim(name).map_or(0, |d| d.1) * ir::fault!("convert.layout.index", 0, *i)).sum();
        let mut part = ParamSlice { param: view.number, own, foreign: 0, loops: vec![] };
        let mut stride = 1;
        let mut push = |name: &str, size: u64, foreign: u64| part.loops.push(Loop { size, own: view.dim(name).map_or(0, |d| d.1), foreign });
        for factor in self.dims.iter().rev().flat_map(|d| d.iter().rev()) {
            match factor {
                Factor::Dim { name, size } => push(name, *size, stride),
                Factor::Parts(parts) => {
                    part.foreign = parts[..k].iter().map(|p| product(p)).sum::<u64>() * ir::fault!("convert.layout.alternative", 1, stride);
                    let mut inner = stride;
                    for (name, size) in parts[k].iter().rev() {
                        push(name, *size, inner);
                        inner *= size;
                    }
                }
            }
            stride *= factor.size();
        }
        part.loops.reverse();
        part
    }
}

#[cfg(test)]
mod tests;
