//! Several neighbouring elements of global memory in one access of a lane: up to 16 bytes, as 32-bit words.

use super::instructions::built;
use super::simt::{Simt, Value};
use super::{Builder, IntBinary, Lane};
use inkwell::types::{BasicType, IntType};
use inkwell::values::{BasicValue, IntValue, PointerValue};

/// Most words of an access.
const MOST: usize = 4;

impl<'c> Simt<'c> {
    /// Elements of at most 4 bytes, whole words of them. Lanes outside of a mask read nothing and get zeros.
    pub(super) fn load_words(&self, from: PointerValue<'c>, lane: Lane, count: usize, mask: Option<Value<'c>>) -> Vec<Value<'c>> {
        let (int, of_word) = (self.context.i32_type(), 4 / lane.bytes() as usize);
        let words = count / of_word;
        let mut loaded = vec![];
        for first in (0..words).step_by(MOST) {
            let some = (words - first).min(MOST);
            let ty = int.vec_type(some as u32);
            let load = || {
                let vector = built(self.writer.build_load(ty, self.at_const(from, 4 * first as i64), ""));
                let access = vector.as_instruction_value().expect("invariant: a load is an instruction");
                access.set_alignment(4 * some as u32).expect("invariant: a power of two");
                vector
            };
            let vector = match mask {
                None => load(),
                Some(mask) => self.only(mask, Some(ty.into()), || Some(load())).expect("invariant: a load has a result"),
            };
            loaded.extend((0..some).map(|k| built(self.writer.build_extract_element(vector.into_vector_value(), self.word(k as i64), ""))));
        }
        (0..count).map(|k| self.element(loaded[k / of_word].into_int_value(), k % of_word, lane)).collect()
    }

    /// The integer type as wide as an element.
    fn number_type(&self, lane: Lane) -> IntType<'c> {
        match lane.bytes() {
            1 => self.context.i8_type(),
            2 => self.context.i16_type(),
            _ => self.context.i32_type(),
        }
    }

    /// An element of a word.
    fn element(&self, word: IntValue<'c>, number: usize, lane: Lane) -> Value<'c> {
        let bits = 8 * lane.bytes() as u32;
        let shifted = self.bits(IntBinary::ShrLogical, word, self.word((number as u32 * bits).into()));
        let narrow = built(self.writer.build_int_truncate_or_bit_cast(shifted, self.number_type(lane), ""));
        let ty = self.stored_type(lane);
        let stored = if ty.is_float_type() { built(self.writer.build_bit_cast(narrow, ty.as_basic_type_enum(), "")) } else { narrow.into() };
        self.loaded(lane, stored)
    }

    /// The inverse of [`Simt::load_words`].
    pub(super) fn store_words(&self, to: PointerValue<'c>, values: &[Value<'c>], lane: Lane) {
        let (int, bits) = (self.context.i32_type(), 8 * lane.bytes() as u32);
        let words: Vec<IntValue> = values
            .chunks_exact(4 / lane.bytes() as usize)
            .map(|of_word| {
                let mut word = self.word(0);
                for (number, value) in (0..).zip(of_word) {
                    let narrow = built(self.writer.build_bit_cast(self.storable(lane, *value), self.number_type(lane), ""));
                    let wide = built(self.writer.build_int_z_extend_or_bit_cast(narrow.into_int_value(), int, ""));
                    word = self.bits(IntBinary::Or, word, self.bits(IntBinary::Shl, wide, self.word((number * bits).into())));
                }
                word
            })
            .collect();
        for (number, some) in (0..).zip(words.chunks(MOST)) {
            let mut vector = int.vec_type(some.len() as u32).get_undef();
            for (k, word) in some.iter().enumerate() {
                vector = built(self.writer.build_insert_element(vector, *word, self.word(k as i64), ""));
            }
            let access = built(self.writer.build_store(self.at_const(to, 4 * MOST as i64 * number), vector));
            access.set_alignment(4 * some.len() as u32).expect("invariant: a power of two");
        }
    }
}
