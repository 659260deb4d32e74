//! Python's pickles, read as data: nothing of a pickle is executed or imported.
//!
//! A pickle is a program for a stack machine, and may name any function of Python's to be called. Here a name is a
//! symbol of a list that the caller gives, and a call is a node ([`Node::Made`]) that says what was to be called
//! with what; every other name and every instruction that PyTorch's files do not need is refused, by its name. No
//! kept crate does that: serde-pickle refuses names altogether, and those that read PyTorch's files come with a
//! tensor library.
//!
//! **Invariant:** an instruction of n bytes makes at most one node, whose parts are what earlier ones have put on
//! the stack, each once. So memory is a constant times the bytes, and nothing recurses: nodes are numbers in one
//! list. A node may be part of itself; readers go down a fixed number of levels.

mod opcode;
mod write;

pub(crate) use write::Writer;

use std::collections::HashMap;

/// A name that a pickle may have: module, then what is in it.
pub type Symbol = (&'static str, &'static str);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PickleError {
    #[error("byte {at}: it ends in the middle of a pickle")]
    Truncated { at: usize },
    #[error("byte {at}: the instruction {name} is none that is read here")]
    Opcode { at: usize, name: String },
    #[error("byte {at}: it names `{name}`, which is none of the names that are read here; nothing of it was executed")]
    Symbol { at: usize, name: String },
    #[error("byte {at}: {what}")]
    Malformed { at: usize, what: &'static str },
}

/// The number of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(u32);

#[derive(Clone, Debug, PartialEq)]
pub enum Node<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A symbol, by its number in the caller's list.
    Symbol(u16),
    /// What would be an object: a symbol, with what it is called with, and the state that it is given.
    Made {
        callee: u16,
        args: Id,
        state: Option<Id>,
    },
    /// A reference to something outside the pickle.
    Outside(Id),
}

/// A pickle that was read.
pub struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    symbols: &'static [Symbol],
    root: Id,
}

impl<'a> Pickle<'a> {
    /// Reads one pickle; bytes after its end are left alone.
    ///
    /// # Errors
    /// It is none, or has names or instructions that are not read here.
    pub fn read(bytes: &'a [u8], symbols: &'static [Symbol]) -> Result<Pickle<'a>, PickleError> {
        let mut machine = Machine { bytes, at: 0, start: 0, symbols, nodes: vec![], stack: vec![], marks: vec![], memo: HashMap::new() };
        loop {
            machine.start = machine.at;
            if let Some(root) = machine.step()? {
                return Ok(Pickle { nodes: machine.nodes, symbols, root });
            }
        }
    }

    pub fn root(&self) -> Id {
        self.root
    }

    pub fn node(&self, id: Id) -> &Node<'a> {
        &self.nodes[id.0 as usize]
    }

    pub fn text(&self, id: Id) -> Option<&'a str> {
        if let Node::Text(text) = self.node(id) { Some(text) } else { None }
    }

    /// A number that is not negative.
    pub fn count(&self, id: Id) -> Option<u64> {
        if let Node::Int(n) = self.node(id) { u64::try_from(*n).ok() } else { None }
    }

    /// Items of a tuple or list.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        if let Node::Tuple(items) | Node::List(items) = self.node(id) { Some(items) } else { None }
    }

    /// Entries of a dict.
    pub fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        if let Node::Dict(entries) = self.node(id) { Some(entries) } else { None }
    }

    pub fn symbol(&self, id: Id) -> Option<Symbol> {
        if let Node::Symbol(k) = self.node(id) { Some(self.symbols[*k as usize]) } else { None }
    }

    /// The symbol that is called for an object, and its arguments.
    pub fn made(&self, id: Id) -> Option<(Symbol, &[Id])> {
        let Node::Made { callee, args, .. } = self.node(id) else { return None };
        Some((self.symbols[*callee as usize], self.items(*args)?))
    }

    /// The state that an object is given.
    pub fn state(&self, id: Id) -> Option<Id> {
        if let Node::Made { state, .. } = self.node(id) { *state } else { None }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Offset of the instruction.
    start: usize,
    symbols: &'static [Symbol],
    nodes: Vec<Node<'a>>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    /// Reads one instruction; the last one gives the root.
    fn step(&mut self) -> Result<Option<Id>, PickleError> {
        let [op] = self.array()?;
        match op {
            opcode::PROTO => {
                if self.array::<1>()?[0] > 5 {
                    return Err(self.malformed("it is of a protocol after 5"));
                }
            }
            // A frame says how much may be read at once, which is of no use, as all of it is in memory.
            opcode::FRAME => drop(self.array::<8>()?),
            opcode::STOP => return self.pop().map(Some),
            opcode::MARK => self.marks.push(self.stack.len()),
            opcode::NONE => self.push(Node::None)?,
            opcode::NEWTRUE => self.push(Node::Bool(true))?,
            opcode::NEWFALSE => self.push(Node::Bool(false))?,
            opcode::BININT => {
                let n = i32::from_le_bytes(self.array()?);
                self.push(Node::Int(n.into()))?;
            }
            opcode::BININT1 => {
                let [n] = self.array()?;
                self.push(Node::Int(n.into()))?;
            }
            opcode::BININT2 => {
                let n = u16::from_le_bytes(self.array()?);
                self.push(Node::Int(n.into()))?;
            }
            opcode::LONG1 => {
                let [len] = self.array()?;
                let digits = self.take(len.into())?;
                let n = long(digits).ok_or_else(|| self.malformed("a whole number has more than 64 bits"))?;
                self.push(Node::Int(n))?;
            }
            opcode::BINFLOAT => {
                let x = f64::from_be_bytes(self.array()?);
                self.push(Node::Float(x))?;
            }
            opcode::SHORT_BINUNICODE => {
                let [len] = self.array()?;
                self.text(len.into())?;
            }
            opcode::BINUNICODE => {
                let len = u32::from_le_bytes(self.array()?);
                self.text(len.into())?;
            }
            opcode::BINUNICODE8 => {
                let len = u64::from_le_bytes(self.array()?);
                self.text(len)?;
            }
            opcode::EMPTY_TUPLE => self.push(Node::Tuple(vec![]))?,
            opcode::TUPLE1 => self.tuple(1)?,
            opcode::TUPLE2 => self.tuple(2)?,
            opcode::TUPLE3 => self.tuple(3)?,
            opcode::TUPLE => {
                let items = self.marked()?;
                self.push(Node::Tuple(items))?;
            }
            opcode::EMPTY_LIST => self.push(Node::List(vec![]))?,
            opcode::APPEND => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            opcode::APPENDS => {
                let items = self.marked()?;
                self.append(&items)?;
            }
            opcode::EMPTY_DICT => self.push(Node::Dict(vec![]))?,
            opcode::SETITEM => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])?;
            }
            opcode::SETITEMS => {
                let items = self.marked()?;
                self.set(&items)?;
            }
            opcode::GLOBAL => {
                let (module, name) = (self.line()?, self.line()?);
                self.symbol(module, name)?;
            }
            opcode::STACK_GLOBAL => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Node::Text(module), Node::Text(name)) = (&self.nodes[module.0 as usize], &self.nodes[name.0 as usize]) else {
                    return Err(self.malformed("a name is no text"));
                };
                self.symbol(module, name)?;
            }
            opcode::REDUCE | opcode::NEWOBJ => self.made()?,
            opcode::BUILD => {
                let given = self.pop()?;
                let object = self.top()?;
                match &mut self.nodes[object.0 as usize] {
                    Node::Made { state: state @ None, .. } => *state = Some(given),
                    _ => return Err(self.malformed("a state is given to what is no object, or has one")),
                }
            }
            opcode::BINPERSID => {
                let id = self.pop()?;
                self.push(Node::Outside(id))?;
            }
            opcode::BINPUT => {
                let [k] = self.array()?;
                self.remember(k.into())?;
            }
            opcode::LONG_BINPUT => {
                let k = u32::from_le_bytes(self.array()?);
                self.remember(k)?;
            }
            opcode::MEMOIZE => {
                let k = u32::try_from(self.memo.len()).map_err(|_| self.malformed("it has too many parts"))?;
                self.remember(k)?;
            }
            opcode::BINGET => {
                let [k] = self.array()?;
                self.recall(k.into())?;
            }
            opcode::LONG_BINGET => {
                let k = u32::from_le_bytes(self.array()?);
                self.recall(k)?;
            }
            other => return Err(PickleError::Opcode { at: self.start, name: opcode::name(other) }),
        }
        Ok(None)
    }

    fn malformed(&self, what: &'static str) -> PickleError {
        PickleError::Malformed { at: self.start, what }
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], PickleError> {
        let rest = &self.bytes[self.at..];
        let len = usize::try_from(len).ok().filter(|n| *n <= rest.len()).ok_or(PickleError::Truncated { at: self.start })?;
        self.at += len;
        Ok(&rest[..len])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        Ok(self.take(N as u64)?.try_into().expect("invariant: so many were taken"))
    }

    fn utf8(&self, bytes: &'a [u8]) -> Result<&'a str, PickleError> {
        std::str::from_utf8(bytes).map_err(|_| self.malformed("a text is not UTF-8"))
    }

    fn line(&mut self) -> Result<&'a str, PickleError> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|b| *b == b'\n').ok_or(PickleError::Truncated { at: self.start })?;
        self.at += len + 1;
        self.utf8(&rest[..len])
    }

    fn text(&mut self, len: u64) -> Result<(), PickleError> {
        let bytes = self.take(len)?;
        let text = self.utf8(bytes)?;
        self.push(Node::Text(text))
    }

    fn symbol(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        let found = self.symbols.iter().position(|s| *s == (module, name));
        // The name is cut to what a message can hold.
        let said = || format!("{module}.{name}").chars().take(80).collect();
        let found = found.ok_or_else(|| PickleError::Symbol { at: self.start, name: said() })?;
        self.push(Node::Symbol(found as u16))
    }

    fn push(&mut self, node: Node<'a>) -> Result<(), PickleError> {
        let id = u32::try_from(self.nodes.len()).map_err(|_| self.malformed("it has too many parts"))?;
        self.nodes.push(node);
        self.stack.push(Id(id));
        Ok(())
    }

    /// The last on the stack, above the last mark.
    fn top(&self) -> Result<Id, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack[floor..].last().copied().ok_or_else(|| self.malformed("it takes more from the stack than there is"))
    }

    fn pop(&mut self) -> Result<Id, PickleError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// All above the last mark, which goes too.
    fn marked(&mut self) -> Result<Vec<Id>, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| self.malformed("there is no mark"))?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, len: usize) -> Result<(), PickleError> {
        let mut items = vec![];
        for _ in 0..len {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Node::Tuple(items))
    }

    fn append(&mut self, items: &[Id]) -> Result<(), PickleError> {
        let list = self.top()?;
        let Node::List(list) = &mut self.nodes[list.0 as usize] else { return Err(self.malformed("it appends to what is no list")) };
        list.extend(items);
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Result<(), PickleError> {
        let dict = self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        let Node::Dict(dict) = &mut self.nodes[dict.0 as usize] else { return Err(self.malformed("it sets items of what is no dict")) };
        dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
        if rest.is_empty() { Ok(()) } else { Err(self.malformed("a key has no value")) }
    }

    fn made(&mut self) -> Result<(), PickleError> {
        let (args, callee) = (self.pop()?, self.pop()?);
        match (&self.nodes[callee.0 as usize], &self.nodes[args.0 as usize]) {
            (Node::Symbol(callee), Node::Tuple(_)) => self.push(Node::Made { callee: *callee, args, state: None }),
            _ => Err(self.malformed("it calls what is no name, or with what is no tuple")),
        }
    }

    fn remember(&mut self, k: u32) -> Result<(), PickleError> {
        let top = self.top()?;
        self.memo.insert(k, top);
        Ok(())
    }

    fn recall(&mut self, k: u32) -> Result<(), PickleError> {
        let id = *self.memo.get(&k).ok_or_else(|| self.malformed("it recalls what it has not remembered"))?;
        self.stack.push(id);
        Ok(())
    }
}

/// A whole number in two's complement, the lowest byte first.
fn long(digits: &[u8]) -> Option<i64> {
    let sign = if digits.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
    let mut all = [sign; 8];
    all.get_mut(..digits.len())?.copy_from_slice(digits);
    Some(i64::from_le_bytes(all))
}

#[cfg(test)]
mod tests;
