//! How many layers each virtual stage holds, and where what is outside of layers goes.

use ir::diag::Diagnostic;
use ir::dim::Dim;
use ir::graph::{Body, Graph, Phase, Value};
use ir::op::{Op, Routing};
use ir::options::Counts;
use ir::pipeline::VirtualStage;

fn error(text: impl Into<String>, help: impl Into<String>) -> Diagnostic {
    Diagnostic::error("E0633", text).help(help)
}

/// The most virtual stages and layers that a text may come to.
const MOST: usize = 1 << 16;

/// Reads `Et*3|(tt|)*2tL`: `E` the embedding, `t` a layer, `L` the loss, `|` between virtual stages; `*n` repeats what is before it, which may
/// be in parentheses; commas and blanks say nothing.
///
/// # Errors
/// E0633, with what was expected and where.
pub fn parse(text: &str) -> Result<Vec<VirtualStage>, Diagnostic> {
    let chars: Vec<char> = text.chars().filter(|c| !c.is_whitespace() && *c != ',').collect();
    let mut at = 0;
    let symbols = sequence(&chars, &mut at, 0)?;
    if let Some(c) = chars.get(at) {
        return Err(error(format!("`{c}` in the pipeline layout closes nothing"), EXAMPLE));
    }
    let mut parts = vec![];
    for symbols in symbols.split(|c| *c == '|') {
        let mut part = VirtualStage::default();
        for symbol in symbols {
            match symbol {
                't' | 'm' => part.layers += 1,
                'E' => part.embedding = true,
                _ => part.loss = true,
            }
        }
        parts.push(part);
    }
    let count = |symbol: char| symbols.iter().filter(|c| **c == symbol).count();
    for (symbol, name) in [('E', "embedding"), ('L', "loss")] {
        if count(symbol) > 1 {
            return Err(error(format!("the pipeline layout has the {name} `{symbol}` {} times", count(symbol)), "once, at an end"));
        }
    }
    let position = |symbol: char| symbols.iter().filter(|c| **c != '|').position(|c| *c == symbol);
    let length = symbols.iter().filter(|c| **c != '|').count();
    if position('E').is_some_and(|k| k != 0) || position('L').is_some_and(|k| k + 1 != length) {
        return Err(error("the embedding comes first in a pipeline layout, the loss last", EXAMPLE));
    }
    if symbols.iter().skip_while(|c| **c != 'm').any(|c| *c == 't') {
        return Err(error("layers `m`, which predict further tokens, come behind all others in a pipeline layout", EXAMPLE));
    }
    Ok(parts)
}

const EXAMPLE: &str = "for example `Et*3|t*4|t*4|t*3L`: embedding and 3 layers, 4 layers, 4 layers, 3 layers and the loss";

fn sequence(chars: &[char], at: &mut usize, depth: u32) -> Result<Vec<char>, Diagnostic> {
    let mut out: Vec<char> = vec![];
    while let Some(c) = chars.get(*at).filter(|c| **c != ')') {
        *at += 1;
        let mut item = match c {
            'E' | 't' | 'm' | 'L' | '|' => vec![*c],
            '(' if depth < 8 => {
                let inner = sequence(chars, at, depth + 1)?;
                if chars.get(*at) != Some(&')') {
                    return Err(error("a `(` in the pipeline layout is not closed", EXAMPLE));
                }
                *at += 1;
                inner
            }
            other => return Err(error(format!("`{other}` means nothing in a pipeline layout"), EXAMPLE)),
        };
        if chars.get(*at) == Some(&'*') {
            let digits: String = chars[*at + 1..].iter().take_while(|c| c.is_ascii_digit()).collect();
            *at += 1 + digits.len();
            let times = digits.parse::<usize>().ok().filter(|n| (1..=MOST).contains(n) && n * item.len().max(1) <= MOST);
            let times = times.ok_or_else(|| error(format!("`*{digits}` in the pipeline layout is not `*1` to `*{MOST}`"), EXAMPLE))?;
            item = item.repeat(times);
        }
        out.extend(item);
        if out.len() > MOST {
            return Err(error(format!("the pipeline layout has more than {MOST} parts"), EXAMPLE));
        }
    }
    Ok(out)
}

/// As even as possible; the first hold one more where it does not divide.
fn even(units: u32, parts: u32) -> Vec<u32> {
    (0..parts).map(|g| units / parts + u32::from(g < units % parts)).collect()
}

/// The parts of an even cut, of which the first and the last have a layer less where embedding and loss count as one. None if something
/// would be left with nothing.
pub fn even_parts(layers: u32, parts: u32, embedding: Counts, loss: Counts) -> Option<Vec<VirtualStage>> {
    let extra = |counts: Counts| u32::from(counts == Counts::AsLayer);
    let units = layers.checked_add(extra(embedding) + extra(loss))?;
    if parts > 1 && units < parts {
        return None;
    }
    let mut sizes = even(units, parts);
    *sizes.first_mut()? -= extra(embedding);
    let last = sizes.last_mut()?;
    *last = last.checked_sub(extra(loss))?;
    let end = parts as usize - 1;
    let part = |(g, layers): (usize, u32)| VirtualStage { layers, embedding: g == 0, loss: g == end };
    Some(sizes.into_iter().enumerate().map(part).collect())
}

/// Elements of each value that are computed: of the places of a dispatched value, those that its choices can name.
pub fn computed(body: &Body) -> Vec<u64> {
    let size = |d: &Dim| body.dims.size(*d);
    let mut routed: Vec<Option<Routing>> = vec![None; body.nodes.len()];
    let of_value = |v: Value| {
        let node = &body[v];
        let places = match &node.op {
            Op::Dispatch(r) => Some(*r),
            _ => node.args.iter().find_map(|a| routed[a.index()]).filter(|r| node.ty.has(r.experts)),
        };
        routed[v.index()] = places;
        match places {
            Some(r) => body.elements(v) / size(&r.experts) * size(&r.choice).min(size(&r.experts)),
            None => body.elements(v),
        }
    };
    body.values().map(of_value).collect()
}

/// Floating-point operations of the forward pass, of [`computed`] elements: before the layers, of each layer, after
/// them.
pub fn costs(graph: &Graph) -> Vec<u64> {
    let body = &graph.body;
    let size = |d: &Dim| body.dims.size(*d);
    let mut costs = vec![0u64; graph.layers as usize + 2];
    // `after` marks values that depend on a layer.
    let mut after = vec![false; body.nodes.len()];
    let computed = computed(body);
    for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward) {
        let node = &body[v];
        after[v.index()] = node.origin.layer.is_some() || node.args.iter().any(|a| after[a.index()]);
        let each = match &node.op {
            Op::Dot { over, .. } => 2 * over.iter().map(size).product::<u64>(),
            Op::Attention(a) => {
                let [keys, d, values] = [a.keys, a.d, a.values].map(|d| size(&d).max(1));
                2 * a.pairs(keys) * (d + values) / (keys * values)
            }
            _ if node.op.is_source() => 0,
            _ => 1,
        };
        let unit = match node.origin.layer {
            Some(l) => l as usize + 1,
            None if after[v.index()] => graph.layers as usize + 1,
            None => 0,
        };
        costs[unit] = costs[unit].saturating_add(each.saturating_mul(computed[v.index()]));
    }
    costs
}

/// Cuts units (embedding, layers, loss) into so many parts of consecutive ones, none empty, whose greatest cost is least. None if there are
/// fewer units than parts.
pub fn balanced(costs: &[u64], parts: u32) -> Option<Vec<VirtualStage>> {
    let (n, parts) = (costs.len(), parts as usize);
    if n < parts {
        return None;
    }
    // Each part takes as many units as fit under the limit, but leaves one for each part that follows.
    let cut = |limit: u64| {
        let mut ends = vec![];
        let mut first = 0;
        for part in 0..parts {
            let most = n - (parts - 1 - part);
            let mut end = first + 1;
            let mut sum = costs[first];
            while end < most && sum.saturating_add(costs[end]) <= limit {
                sum += costs[end];
                end += 1;
            }
            if sum > limit {
                return None;
            }
            ends.push(end);
            first = end;
        }
        (first == n).then_some(ends)
    };
    let (mut low, mut high) = (0u64, costs.iter().fold(0u64, |n, c| n.saturating_add(*c)));
    while low < high {
        let middle = low + (high - low) / 2;
        if cut(middle).is_some() { high = middle } else { low = middle + 1 }
    }
    let ends = cut(low)?;
    let begins = std::iter::once(0).chain(ends.iter().copied());
    let part = |(begin, end): (usize, usize)| {
        let (embedding, loss) = (begin == 0, end == n);
        VirtualStage { layers: (end - begin) as u32 - u32::from(embedding) - u32::from(loss), embedding, loss }
    };
    Some(begins.zip(ends.iter().copied()).map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::build::Builder;
    use ir::dim::DimInfo;
    use ir::graph::{Body, Origin, Type};
    use ir::op::DType;

    fn text(parts: &[VirtualStage]) -> String {
        let one =
            |p: &VirtualStage| format!("{}{}{}", if p.embedding { "E" } else { "" }, "t".repeat(p.layers as usize), if p.loss { "L" } else { "" });
        parts.iter().map(one).collect::<Vec<_>>().join("|")
    }

    fn read(layout: &str) -> String {
        match parse(layout) {
            Ok(parts) => text(&parts),
            Err(e) => e.message,
        }
    }

    #[test]
    fn the_text_form_repeats_and_groups() {
        assert_eq!(read("Et*3|t*4|t*3L"), "Ettt|tttt|tttL");
        assert_eq!(read("E,t | (tt|)*2, L"), "Et|tt|tt|L");
        assert_eq!(read("E|(t|t)*2|L"), "E|t|tt|t|L");
        assert_eq!(read("Et|t|mL"), "Et|t|tL");
        assert!(read("Et|m|tL").contains("behind all others"));
        assert_eq!(read("Et)"), "`)` in the pipeline layout closes nothing");
        assert_eq!(read("E(t"), "a `(` in the pipeline layout is not closed");
        assert_eq!(read("Ex"), "`x` means nothing in a pipeline layout");
        assert_eq!(read("Et*0"), "`*0` in the pipeline layout is not `*1` to `*65536`");
        assert_eq!(read("(((t*60000)*60000)*60000)"), "`*60000` in the pipeline layout is not `*1` to `*65536`");
        assert_eq!(read("tE|tL"), "the embedding comes first in a pipeline layout, the loss last");
        assert_eq!(read("EtE"), "the pipeline layout has the embedding `E` 2 times");
    }

    #[test]
    fn embedding_and_loss_count_as_layers_if_asked() {
        use Counts::{AsLayer, AsNothing};
        let parts = |layers, n, e, l| even_parts(layers, n, e, l).map(|p| text(&p));
        assert_eq!(parts(6, 4, AsNothing, AsNothing).as_deref(), Some("Ett|tt|t|tL"));
        assert_eq!(parts(6, 4, AsLayer, AsLayer).as_deref(), Some("Et|tt|tt|tL"));
        assert_eq!(parts(3, 4, AsLayer, AsNothing).as_deref(), Some("E|t|t|tL"));
        assert_eq!(parts(3, 4, AsNothing, AsNothing), None);
    }

    #[test]
    fn experts_cost_what_is_chosen() {
        let mut body = Body::default();
        let [tokens, choice, experts, h, f] =
            [("tokens", 6), ("choice", 2), ("experts", 8), ("h", 3), ("f", 5)].map(|(n, s)| body.dims.add(DimInfo::new(n, s)));
        let mut b = Builder { body: &mut body, origin: Origin { layer: Some(0), ..Origin::new(Phase::Forward) } };
        let mut input = |k, ty| b.typed(Op::Input(k), &[], ty);
        let x = input(0, Type::new(DType::F32, [tokens, h]));
        let chosen = input(1, Type::new(DType::I32, [tokens, choice]));
        let w = input(2, Type::new(DType::F32, [experts, h, f]));
        let rows = b.op(Op::Dispatch(Routing { experts, choice }), &[x, chosen]);
        let y = b.op(Op::dot(vec![h]), &[rows, w]);
        b.op(Op::Combine(Routing { experts, choice }), &[y, chosen]);
        let graph = Graph { body, layers: 1, ..Graph::default() };
        assert_eq!(costs(&graph), [0, 6 * 2 * (3 + 2 * 3 * 5 + 5), 0]);
    }

    #[test]
    fn a_balanced_cut_has_the_least_greatest_cost() {
        let cut = |costs: &[u64], n| balanced(costs, n).map(|p| text(&p));
        // The loss costs as much as two layers.
        assert_eq!(cut(&[0, 5, 5, 5, 5, 5, 5, 10], 4).as_deref(), Some("Ett|tt|tt|L"));
        assert_eq!(cut(&[0, 5, 5, 5, 5, 1], 2).as_deref(), Some("Ett|ttL"));
        assert_eq!(cut(&[9, 1, 9], 3).as_deref(), Some("E|t|L"));
        assert_eq!(cut(&[9, 1, 9], 4), None);
    }

    /// Against all cuts of small lists.
    #[test]
    fn no_cut_is_better_than_the_balanced_one() {
        let mut state = 1;
        for _ in 0..300 {
            let mut draw = |n: u64| {
                state = ir::random::mix(state);
                state % n
            };
            let costs: Vec<u64> = (0..2 + draw(6)).map(|_| draw(20)).collect();
            let parts = 1 + draw(costs.len() as u64) as usize;
            let greatest = |ends: &[usize]| {
                let begins = std::iter::once(0).chain(ends.iter().copied());
                begins.zip(ends.iter().copied().chain([costs.len()])).map(|(a, b)| costs[a..b].iter().sum::<u64>()).max()
            };
            let all = (0..1u32 << (costs.len() - 1)).filter(|set| set.count_ones() as usize == parts - 1);
            let best = all.filter_map(|set| greatest(&(1..costs.len()).filter(|k| set >> (k - 1) & 1 == 1).collect::<Vec<_>>())).min();
            let cut = balanced(&costs, parts as u32).unwrap();
            let units = |p: &VirtualStage| p.layers as usize + usize::from(p.embedding) + usize::from(p.loss);
            let ends: Vec<usize> = cut[..parts - 1]
                .iter()
                .scan(0, |at, p| {
                    Some({
                        *at += units(p);
                        *at
                    })
                })
                .collect();
            assert_eq!(greatest(&ends), best, "{costs:?} in {parts}");
        }
    }
}
