//! The text of a module as a tree. Nothing is checked here but the grammar.

use crate::fault::LoadError;
use pest::Parser;
use pest::iterators::Pair;
use pest_derive::Parser;

#[derive(Parser)]
#[grammar = "ptx.pest"]
struct PtxParser;

/// A module: variables and kernels.
#[derive(Clone, Debug, Default)]
pub struct ParsedModule {
    pub variables: Vec<Variable>,
    pub kernels: Vec<ParsedKernel>,
    /// Number and name of each `.file`.
    pub files: Vec<(u64, String)>,
}

#[derive(Clone, Debug)]
pub struct Variable {
    pub space: String,
    pub align: u64,
    /// Such as `b8`, `f32`.
    pub element: String,
    pub name: String,
    /// Number of elements, 1 of a scalar; absent for `name[]`, whose size the launch gives.
    pub count: Option<u64>,
    pub initial: Vec<Number>,
    pub line: u32,
}

#[derive(Clone, Debug)]
pub struct ParsedKernel {
    pub name: String,
    pub parameters: Vec<Variable>,
    /// Such as `.maxntid` with its numbers.
    pub attributes: Vec<(String, Vec<u64>)>,
    pub body: Vec<Statement>,
}

#[derive(Clone, Debug)]
pub enum Statement {
    Block(Vec<Statement>),
    Label(String),
    /// `.loc`: file and line of the source that follows.
    Location(u64, u64),
    /// Names with `<n>` stand for `name0 ..`.
    Registers {
        element: String,
        names: Vec<(String, Option<u64>)>,
        line: u32,
    },
    Variable(Variable),
    Instruction(Instruction),
}

#[derive(Clone, Debug)]
pub struct Instruction {
    /// The predicate that guards it, and whether negated.
    pub guard: Option<(String, bool)>,
    /// The opcode with its modifiers, such as `ld.global.f32`.
    pub opcode: String,
    pub operands: Vec<Operand>,
    pub line: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    Symbol(String),
    Negated(String),
    /// `p|q`: two results.
    Pair(String, String),
    Number(Number),
    Vector(Vec<Operand>),
    /// Base, offset, and what follows them within the brackets.
    Address(Box<Operand>, i64, Vec<Operand>),
    Group(Vec<Operand>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Int(i64),
    /// Bits of an f32.
    F32(u32),
    /// Bits of an f64.
    F64(u64),
}

/// Parses a module.
///
/// # Errors
/// The place of the first thing that is not PTX as this grammar knows it.
pub fn parse(text: &str) -> Result<ParsedModule, LoadError> {
    let bad = |e: pest::error::Error<Rule>| {
        let line = match e.line_col {
            pest::error::LineColLocation::Pos((l, _)) | pest::error::LineColLocation::Span((l, _), _) => l as u32,
        };
        LoadError { line, message: format!("syntax: {}", e.variant.message()) }
    };
    let module = PtxParser::parse(Rule::module, text).map_err(bad)?.next().expect("invariant: a module is one rule");
    let mut out = ParsedModule::default();
    for item in module.into_inner() {
        match item.as_rule() {
            Rule::variable => out.variables.push(variable(item)?),
            Rule::kernel => out.kernels.push(kernel(item)?),
            Rule::function => return Err(error(&item, "functions are not supported: inline them")),
            Rule::file => {
                let mut inner = item.into_inner();
                let number = integer(&inner.next().expect("invariant: a file has a number"))?;
                let name = inner.next().expect("invariant: a file has a name").as_str();
                out.files.push((number as u64, name.trim_matches('"').to_string()));
            }
            _ => {}
        }
    }
    Ok(out)
}

fn line(pair: &Pair<'_, Rule>) -> u32 {
    pair.line_col().0 as u32
}

fn error(pair: &Pair<'_, Rule>, message: impl Into<String>) -> LoadError {
    LoadError { line: line(pair), message: message.into() }
}

fn number(pair: &Pair<'_, Rule>) -> Result<Number, LoadError> {
    let text = pair.as_str();
    let bad = || error(pair, format!("`{text}` is not a number that fits 64 bits"));
    if let Some(hex) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        return u32::from_str_radix(hex, 16).map(Number::F32).map_err(|_| bad());
    }
    if let Some(hex) = text.strip_prefix("0d").or(text.strip_prefix("0D")) {
        return u64::from_str_radix(hex, 16).map(Number::F64).map_err(|_| bad());
    }
    if text.contains('.') {
        return text.parse().map(|x: f64| Number::F64(x.to_bits())).map_err(|_| bad());
    }
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let digits = digits.trim_end_matches('U');
    let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let value = value.map_err(|_| bad())? as i64;
    Ok(Number::Int(if negative { value.wrapping_neg() } else { value }))
}

fn integer(pair: &Pair<'_, Rule>) -> Result<i64, LoadError> {
    match number(pair)? {
        Number::Int(n) => Ok(n),
        Number::F32(_) | Number::F64(_) => Err(error(pair, "an integer belongs here")),
    }
}

fn variable(pair: Pair<'_, Rule>) -> Result<Variable, LoadError> {
    let line = line(&pair);
    let mut v = Variable { space: String::new(), align: 0, element: String::new(), name: String::new(), count: Some(1), initial: vec![], line };
    for part in pair.into_inner() {
        match part.as_rule() {
            Rule::space => v.space = part.as_str()[1..].to_string(),
            Rule::align => v.align = integer(&part.into_inner().next().expect("invariant: an alignment is a number"))? as u64,
            Rule::element => v.element = part.as_str()[1..].to_string(),
            Rule::name => v.name = part.as_str().to_string(),
            Rule::extent => {
                let n = part.into_inner().next().map(|n| integer(&n)).transpose()?;
                v.count = n.zip(v.count).map(|(n, count)| count.saturating_mul(n as u64));
            }
            Rule::initial => v.initial = part.into_inner().map(|n| number(&n)).collect::<Result<_, _>>()?,
            _ => {}
        }
    }
    Ok(v)
}

fn kernel(pair: Pair<'_, Rule>) -> Result<ParsedKernel, LoadError> {
    let mut k = ParsedKernel { name: String::new(), parameters: vec![], attributes: vec![], body: vec![] };
    for part in pair.into_inner() {
        match part.as_rule() {
            Rule::name => k.name = part.as_str().to_string(),
            Rule::variable if k.body.is_empty() && part.as_str().starts_with(".param") => k.parameters.push(variable(part)?),
            Rule::attribute => {
                let mut inner = part.into_inner();
                let name = inner.next().expect("invariant: an attribute has a name").as_str().to_string();
                let numbers = inner.map(|n| integer(&n).map(|n| n as u64)).collect::<Result<_, _>>()?;
                k.attributes.push((name, numbers));
            }
            _ => k.body.push(statement(part)?),
        }
    }
    Ok(k)
}

fn statement(pair: Pair<'_, Rule>) -> Result<Statement, LoadError> {
    let line = line(&pair);
    Ok(match pair.as_rule() {
        Rule::block => Statement::Block(pair.into_inner().map(statement).collect::<Result<_, _>>()?),
        Rule::label => Statement::Label(pair.as_str().trim_end_matches(':').trim_end().to_string()),
        Rule::location => {
            let numbers: Vec<i64> = pair.into_inner().filter(|p| p.as_rule() == Rule::number).map(|n| integer(&n)).collect::<Result<_, _>>()?;
            Statement::Location(numbers[0] as u64, numbers[1] as u64)
        }
        Rule::pragma => Statement::Block(vec![]),
        Rule::variable => Statement::Variable(variable(pair)?),
        Rule::registers => {
            let mut inner = pair.into_inner();
            let element = inner.next().expect("invariant: registers have a type").as_str()[1..].to_string();
            let names = inner.map(|r| {
                let mut parts = r.into_inner();
                let name = parts.next().expect("invariant: a register has a name").as_str().to_string();
                Ok((name, parts.next().map(|n| integer(&n).map(|n| n as u64)).transpose()?))
            });
            Statement::Registers { element, names: names.collect::<Result<_, LoadError>>()?, line }
        }
        _ => {
            let mut out = Instruction { guard: None, opcode: String::new(), operands: vec![], line };
            for part in pair.into_inner() {
                match part.as_rule() {
                    Rule::guard => {
                        let negated = part.as_str()[1..].trim_start().starts_with('!');
                        let name = part.into_inner().last().expect("invariant: a guard has a name");
                        out.guard = Some((name.as_str().to_string(), negated));
                    }
                    Rule::opcode => out.opcode = part.as_str().to_string(),
                    _ => out.operands.push(operand(part)?),
                }
            }
            Statement::Instruction(out)
        }
    })
}

fn operands(pair: Pair<'_, Rule>) -> Result<Vec<Operand>, LoadError> {
    pair.into_inner().map(operand).collect()
}

fn only(pair: Pair<'_, Rule>) -> Pair<'_, Rule> {
    pair.into_inner().next().expect("invariant: the rule has a part")
}

fn operand(pair: Pair<'_, Rule>) -> Result<Operand, LoadError> {
    Ok(match pair.as_rule() {
        Rule::operand => operand(only(pair))?,
        Rule::vector => Operand::Vector(operands(pair)?),
        Rule::group => Operand::Group(operands(pair)?),
        Rule::address => {
            let mut inner = pair.into_inner().peekable();
            let base = operand(inner.next().expect("invariant: an address has a base"))?;
            let offset = match inner.next_if(|p| p.as_rule() == Rule::offset) {
                Some(offset) => match only(offset) {
                    p if p.as_rule() == Rule::minus => p.as_str().parse().map_err(|_| error(&p, "the offset does not fit 64 bits"))?,
                    p => integer(&p)?,
                },
                None => 0,
            };
            Operand::Address(Box::new(base), offset, inner.map(operand).collect::<Result<_, _>>()?)
        }
        Rule::pair => {
            let mut inner = pair.into_inner();
            let mut name = || inner.next().expect("invariant: a pair is two names").as_str().to_string();
            Operand::Pair(name(), name())
        }
        Rule::negated => Operand::Negated(only(pair).as_str().to_string()),
        Rule::number => Operand::Number(number(&pair)?),
        _ => Operand::Symbol(pair.as_str().to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_keep_guards_offsets_vectors_and_lines() {
        let m = parse(
            ".version 8.0\n.target sm_90a, debug\n.address_size 64\n.extern .shared .align 16 .b8 smem[];\n.visible .entry k(.param .u64 k_0)\n.maxntid 128, 1, 1\n{\n\
             .reg .pred %p<2>;\n$L_1: @!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+-8]; // two\n shfl.sync.bfly.b32 %r1|%p0, %r2, 0x1F, 31, -1;\n\
             mov.f32 %f1, 0f3F800000;\n cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];\n}\n",
        )
        .expect("it is PTX");
        assert_eq!(m.variables[0].count, None);
        let k = &m.kernels[0];
        assert_eq!((k.name.as_str(), k.parameters.len(), k.attributes[0].1.clone()), ("k", 1, vec![128, 1, 1]));
        let found: Vec<&Instruction> = k.body.iter().filter_map(|s| if let Statement::Instruction(i) = s { Some(i) } else { None }).collect();
        assert_eq!(found[0].guard, Some(("%p1".into(), true)));
        assert_eq!(found[0].line, 9);
        assert_eq!(found[0].operands[1], Operand::Address(Box::new(Operand::Symbol("%rd1".into())), -8, vec![]));
        assert_eq!(found[1].operands[0], Operand::Pair("%r1".into(), "%p0".into()));
        assert_eq!(found[1].operands[2], Operand::Number(Number::Int(31)));
        assert_eq!(found[2].operands[1], Operand::Number(Number::F32(0x3F80_0000)));
        assert!(matches!(&found[3].operands[1], Operand::Address(_, 0, more) if matches!(&more[0], Operand::Vector(v) if v.len() == 2)));
    }

    #[test]
    fn what_is_not_ptx_is_named_by_line() {
        assert_eq!(parse(".version 8.0\n.target sm_80\n.entry k() {\n add.s32 %r1 %r2;\n}").expect_err("a comma lacks").line, 4);
    }
}
