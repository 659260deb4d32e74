//! From the tree of a module to instructions. What the emulator does not model is refused here, with its line, never
//! ignored.

mod arithmetic;
mod cursor;
mod matrix;
mod memory;
mod sync;

use crate::counts::{Step, steps};
use crate::fault::LoadError;
use crate::flow;
use crate::inst::{D, Inst, Op, P, W};
use crate::registers::Registers;
use crate::syntax::{self, Operand, Statement, Variable};
use cursor::Cursor;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Where generic addresses of shared, local and parameter memory begin; global memory begins at `GLOBAL`.
pub const SHARED: u64 = 1 << 40;
pub const LOCAL: u64 = 2 << 40;
pub const PARAM: u64 = 3 << 40;
pub const GLOBAL: u64 = 16 << 40;

/// Registers of a multiprocessor, and the most registers of a thread, rounded up to a multiple of eight.
const OF_MULTIPROCESSOR: u32 = 65_536;
const MOST_OF_THREAD: u32 = 256;

/// Blocks of a cluster at most, if nothing is said to the driver.
const MOST_RANKS: u32 = 8;

/// A kernel, ready to run.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// As the PTX text has it.
    pub name: String,
    /// Instructions, in the order of the text.
    pub code: Vec<Inst>,
    /// What is known of each instruction before it runs.
    pub steps: Vec<Step>,
    /// Per instruction its line in the PTX text, and file and line of its source.
    pub lines: Vec<(u32, Option<(u32, u32)>)>,
    /// Per instruction where lanes that part there come together again; `code.len()` is the end.
    pub joins: Vec<u32>,
    /// Numbers of registers of 32 bits, of 64 bits, and of predicates.
    pub registers: [usize; 3],
    /// Offset and bytes of each parameter, by the ABI's alignment.
    pub parameters: Vec<(u64, u64)>,
    /// Bytes of all parameters, from the first to the end of the last.
    pub parameter_bytes: u64,
    /// Bytes of static shared memory, at whose end the dynamic part begins.
    pub shared_bytes: u64,
    /// Alignment of dynamic shared memory in bytes; 0 where the kernel has none.
    pub dynamic_align: u64,
    /// Bytes of local memory per thread.
    pub local_bytes: u64,
    /// `.maxntid` or `.reqntid`.
    pub threads: Option<[u32; 3]>,
    /// Whether blocks must have exactly `threads` (`.reqntid`), not at most.
    pub threads_exact: bool,
    /// `.reqnctapercluster`: blocks of a cluster, which are neighbours along x.
    pub cluster: u32,
    /// `.minnctapersm`: blocks that a multiprocessor is to have room for.
    pub resident: u32,
    /// `.maxnreg`: registers of a thread.
    pub most_registers: Option<u32>,
    /// Names of files by their number.
    pub files: HashMap<u32, String>,
}

impl Kernel {
    /// Registers of a thread when a block begins, if something bounds them: `.maxnreg`, or how many blocks of how
    /// many threads share a multiprocessor's.
    pub fn registers_at_launch(&self) -> Option<u32> {
        let threads = self.threads.map(|t| t.iter().product::<u32>().next_multiple_of(32).max(32));
        let shared = threads.map(|t| (OF_MULTIPROCESSOR / (t * self.resident.max(1)) / 8 * 8).min(MOST_OF_THREAD));
        self.most_registers.or(shared)
    }

    /// About as many registers as `ptxas` gives a thread.
    pub fn registers_of_thread(&self) -> u32 {
        crate::liveness::registers(&self.code, self.registers)
    }
}

/// The meaning of names within a kernel.
struct Names {
    /// Address of each variable, in its own space.
    variables: HashMap<String, u64>,
    parameters: HashMap<String, u64>,
    labels: HashMap<String, u32>,
    /// Registers of 32 bits, of 64 bits, predicates.
    counts: [usize; 3],
}

/// The registers of a scope, and of the scope around it.
#[derive(Default)]
struct Scope {
    own: RefCell<HashMap<String, Register>>,
    outer: Option<Rc<Scope>>,
}

impl Scope {
    fn find(&self, name: &str) -> Option<Register> {
        let own = self.own.borrow().get(name).copied();
        own.or_else(|| self.outer.as_ref()?.find(name))
    }
}

#[derive(Clone, Copy)]
enum Register {
    W(W),
    D(D),
    P(P),
}

/// Bytes of an element type, `b8` to `f64`.
pub fn element_bytes(element: &str) -> Option<u64> {
    element.get(1..)?.parse::<u64>().ok().map(|bits| bits / 8).filter(|b| [1, 2, 4, 8, 16].contains(b))
}

fn bytes_of(v: &Variable) -> Result<u64, LoadError> {
    let bytes = element_bytes(&v.element).and_then(|b| b.checked_mul(v.count.unwrap_or(0)));
    bytes.ok_or_else(|| LoadError { line: v.line, message: format!("`{}` has no size", v.name) })
}

/// Decodes a kernel. `globals` are addresses of the module's variables in global and constant memory.
///
/// # Errors
/// The first instruction, modifier or operand that is not known.
pub fn kernel(module: &syntax::ParsedModule, k: &syntax::ParsedKernel, globals: &HashMap<String, u64>) -> Result<Kernel, LoadError> {
    let mut names = Names { variables: globals.clone(), parameters: HashMap::new(), labels: HashMap::new(), counts: [0; 3] };
    let (mut parameters, mut at) = (vec![], 0u64);
    for p in &k.parameters {
        let bytes = bytes_of(p)?;
        let align = p.align.max(element_bytes(&p.element).unwrap_or(1)).max(1);
        at = at.next_multiple_of(align);
        names.parameters.insert(p.name.clone(), at);
        parameters.push((at, bytes));
        at += bytes;
    }
    let mut memory = VariableLayout::default();
    for v in &module.variables {
        memory.place(v, &mut names)?;
    }
    let mut flat = Flat { items: vec![], source: None, names: &mut names, memory: &mut memory };
    flat.statements(&k.body, Rc::default())?;
    let items = flat.items;
    // Dynamic shared memory begins where the static part ends.
    let shared_bytes = memory.shared.next_multiple_of(memory.dynamic_align.max(1));
    names.variables.extend(memory.dynamic.drain(..).map(|name| (name, shared_bytes)));
    let code = items.iter().map(|i| Cursor::new(i.instruction, &i.scope, &names)?.decode()).collect::<Result<Vec<Inst>, _>>()?;
    let lines = items.iter().map(|i| (i.instruction.line, i.source)).collect();
    let code = mark_wgmma(code, names.counts);
    let size = |name: &str| k.attributes.iter().find(|a| a.0 == name).map(|a| [0, 1, 2].map(|d| a.1.get(d).map_or(1, |n| *n as u32)));
    let [cluster, rows, layers] = size(".reqnctapercluster").unwrap_or([1; 3]);
    if [rows, layers] != [1; 2] || !(1..=MOST_RANKS).contains(&cluster) {
        let message = format!("{}: a cluster has 1 to {MOST_RANKS} blocks, along x, not {cluster} x {rows} x {layers}", k.name);
        return Err(LoadError { line: 0, message });
    }
    Ok(Kernel {
        name: k.name.clone(),
        joins: flow::joins(&code),
        steps: steps(&code, names.counts),
        code,
        lines,
        registers: names.counts,
        parameters,
        parameter_bytes: at,
        shared_bytes,
        dynamic_align: memory.dynamic_align,
        local_bytes: memory.local,
        threads: size(".reqntid").or(size(".maxntid")),
        threads_exact: size(".reqntid").is_some(),
        cluster,
        resident: size(".minnctapersm").map_or(1, |n| n[0].max(1)),
        most_registers: size(".maxnreg").map(|n| n[0].next_multiple_of(8)),
        files: module.files.iter().map(|(n, name)| (*n as u32, name.clone())).collect(),
    })
}

/// Layout of shared and local variables.
#[derive(Default)]
struct VariableLayout {
    shared: u64,
    local: u64,
    dynamic_align: u64,
    /// Variables that begin where static shared memory ends.
    dynamic: Vec<String>,
}

impl VariableLayout {
    fn place(&mut self, v: &Variable, names: &mut Names) -> Result<(), LoadError> {
        let align = v.align.max(element_bytes(&v.element).unwrap_or(1)).max(1);
        let end = match v.space.as_str() {
            "shared" if v.count.is_none() => {
                self.dynamic_align = self.dynamic_align.max(align).max(16);
                self.dynamic.push(v.name.clone());
                return Ok(());
            }
            "shared" => &mut self.shared,
            "local" => &mut self.local,
            _ => return Ok(()),
        };
        let at = end.next_multiple_of(align);
        *end = at + bytes_of(v)?;
        names.variables.insert(v.name.clone(), at);
        Ok(())
    }
}

/// A kernel's statements one after the other.
struct Flat<'a, 'n> {
    items: Vec<Item<'a>>,
    source: Option<(u32, u32)>,
    names: &'n mut Names,
    memory: &'n mut VariableLayout,
}

struct Item<'a> {
    instruction: &'a syntax::Instruction,
    source: Option<(u32, u32)>,
    scope: Rc<Scope>,
}

impl<'a> Flat<'a, '_> {
    fn statements(&mut self, list: &'a [Statement], scope: Rc<Scope>) -> Result<(), LoadError> {
        for s in list {
            match s {
                Statement::Block(inner) => self.statements(inner, Rc::new(Scope { own: RefCell::default(), outer: Some(scope.clone()) }))?,
                Statement::Label(name) => {
                    self.names.labels.insert(name.clone(), self.items.len() as u32);
                }
                Statement::Location(file, line) => self.source = Some((*file as u32, *line as u32)),
                Statement::Registers { element, names, line } => {
                    for (name, count) in names {
                        match count {
                            None => self.register(&scope, element, name.clone(), *line)?,
                            Some(n) => (0..*n).try_for_each(|k| self.register(&scope, element, format!("{name}{k}"), *line))?,
                        }
                    }
                }
                Statement::Variable(v) => self.memory.place(v, self.names)?,
                Statement::Instruction(instruction) => {
                    self.items.push(Item { instruction, source: self.source, scope: scope.clone() });
                }
            }
        }
        Ok(())
    }

    fn register(&mut self, scope: &Scope, element: &str, name: String, line: u32) -> Result<(), LoadError> {
        let class = match element {
            "pred" => 2,
            e => match element_bytes(e) {
                Some(1 | 2 | 4) => 0,
                Some(8) => 1,
                _ => return Err(LoadError { line, message: format!("registers of type .{element} are not supported") }),
            },
        };
        let n = u16::try_from(self.names.counts[class]).map_err(|_| LoadError { line, message: "more than 65536 registers of one size".into() })?;
        self.names.counts[class] += 1;
        let register = [Register::W(W(n)), Register::D(D(n)), Register::P(P(n))][class];
        scope.own.borrow_mut().insert(name, register);
        Ok(())
    }
}

/// Marks instructions that write registers which a `wgmma` reads or adds to: a `wgmma.fence` must stand between the
/// two.
fn mark_wgmma(mut code: Vec<Inst>, counts: [usize; 3]) -> Vec<Inst> {
    let mut used = std::collections::HashSet::new();
    for i in &code {
        if let Op::Wgmma(w) = &i.op {
            used.extend(w.accumulators.iter().map(|w| u32::from(w.0)));
            if let crate::inst::MatrixA::Registers(a) = &w.a {
                used.extend(a.iter().map(|w| u32::from(w.0)));
            }
        }
    }
    if !used.is_empty() {
        for i in &mut code {
            i.feeds_wgmma = !matches!(i.op, Op::Wgmma(_)) && Registers::of(i, counts).writes.iter().any(|w| used.contains(w));
        }
    }
    code
}

/// The number of a symbol: a variable's address or a parameter's offset.
fn symbol(names: &Names, name: &str) -> Option<u64> {
    names.variables.get(name).copied().or_else(|| names.parameters.get(name).map(|p| PARAM + p))
}

/// Whether an operand is a plain number.
fn constant(o: &Operand) -> Option<i64> {
    match o {
        Operand::Number(syntax::Number::Int(n)) => Some(*n),
        Operand::Number(syntax::Number::F32(_) | syntax::Number::F64(_))
        | Operand::Symbol(_)
        | Operand::Negated(_)
        | Operand::Pair(..)
        | Operand::Vector(_)
        | Operand::Address(..)
        | Operand::Group(_) => None,
    }
}
