//! Pickles of protocol 2, which every Python 3 and PyTorch's `weights_only` reader take.

use super::{Symbol, opcode};
use std::collections::HashMap;

/// Writes instruction by instruction; who calls it keeps the order that the stack machine wants.
pub(crate) struct Writer {
    out: Vec<u8>,
    /// Symbols that were written, by their number in the memo.
    symbols: HashMap<Symbol, u32>,
}

impl Writer {
    pub fn new() -> Writer {
        Writer { out: vec![opcode::PROTO, 2], symbols: HashMap::new() }
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.out.push(opcode::STOP);
        self.out
    }

    pub fn none(&mut self) {
        self.out.push(opcode::NONE);
    }

    pub fn bool(&mut self, is: bool) {
        self.out.push(if is { opcode::NEWTRUE } else { opcode::NEWFALSE });
    }

    /// A number below 2^63.
    pub fn count(&mut self, n: u64) {
        if let Ok(small) = u8::try_from(n) {
            self.out.extend([opcode::BININT1, small]);
        } else if let Ok(small) = i32::try_from(n) {
            self.out.push(opcode::BININT);
            self.out.extend(small.to_le_bytes());
        } else {
            self.out.extend([opcode::LONG1, 8]);
            self.out.extend(n.to_le_bytes());
        }
    }

    /// Writes a text of fewer than 2^32 bytes.
    pub fn text(&mut self, text: &str) {
        self.out.push(opcode::BINUNICODE);
        self.out.extend((text.len() as u32).to_le_bytes());
        self.out.extend(text.as_bytes());
    }

    pub fn symbol(&mut self, symbol: Symbol) {
        let next = self.symbols.len() as u32;
        if let Some(k) = self.symbols.get(&symbol) {
            self.out.push(opcode::LONG_BINGET);
            self.out.extend(k.to_le_bytes());
            return;
        }
        self.out.push(opcode::GLOBAL);
        self.out.extend(format!("{}\n{}\n", symbol.0, symbol.1).into_bytes());
        self.out.push(opcode::LONG_BINPUT);
        self.out.extend(next.to_le_bytes());
        self.symbols.insert(symbol, next);
    }

    pub fn tuple(&mut self, items: impl FnOnce(&mut Writer)) {
        self.out.push(opcode::MARK);
        items(self);
        self.out.push(opcode::TUPLE);
    }

    pub fn counts(&mut self, items: &[u64]) {
        self.tuple(|w| items.iter().for_each(|n| w.count(*n)));
    }

    pub fn list(&mut self, items: impl FnOnce(&mut Writer)) {
        self.out.extend([opcode::EMPTY_LIST, opcode::MARK]);
        items(self);
        self.out.push(opcode::APPENDS);
    }

    /// Keys and values, in turn.
    pub fn dict(&mut self, items: impl FnOnce(&mut Writer)) {
        self.out.extend([opcode::EMPTY_DICT, opcode::MARK]);
        items(self);
        self.out.push(opcode::SETITEMS);
    }

    /// What a symbol makes of a tuple.
    pub fn call(&mut self, symbol: Symbol, args: impl FnOnce(&mut Writer)) {
        self.symbol(symbol);
        args(self);
        self.out.push(opcode::REDUCE);
    }

    /// An object of a class, with a state.
    pub fn object(&mut self, class: Symbol, state: impl FnOnce(&mut Writer)) {
        self.symbol(class);
        self.out.extend([opcode::EMPTY_TUPLE, opcode::NEWOBJ]);
        state(self);
        self.out.push(opcode::BUILD);
    }

    /// A reference to something outside.
    pub fn outside(&mut self, id: impl FnOnce(&mut Writer)) {
        id(self);
        self.out.push(opcode::BINPERSID);
    }
}
