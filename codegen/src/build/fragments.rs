//! What kernels on tensor cores do with what a warp holds in registers: fast exponentials, pairs of 16-bit floats,
//! votes of all lanes.

use super::asm::Half;
use super::block::Index;
use super::instructions::built;
use super::simt::{Pointer, Simt, Value};
use super::{Builder, Convert, Lane};
use inkwell::types::BasicTypeEnum;

impl<'c> Simt<'c> {
    /// The greater; the other one where one is not a number.
    pub fn maximum(&self, x: Value<'c>, y: Value<'c>) -> Value<'c> {
        self.value("llvm.maxnum", &[x.get_type()], &[x, y])
    }

    /// 2 to the x, by the hardware: off by at most 2 units in the last place, zero below the least normal number.
    pub fn fast_exp2(&self, x: Value<'c>) -> Value<'c> {
        self.value("llvm.nvvm.ex2.approx.ftz", &[x.get_type()], &[x])
    }

    /// The logarithm to base 2, by the hardware: off by at most 2^-22 between 0.5 and 2, by 2 units in the last place
    /// elsewhere.
    pub fn fast_log2(&self, x: Value<'c>) -> Value<'c> {
        self.value("llvm.nvvm.lg2.approx.ftz.f", &[], &[x])
    }

    /// Two f32 rounded to 16 bits, ties to even, in one word: the first in its lower half.
    pub fn half_pair(&self, half: Half, [low, high]: [Value<'c>; 2]) -> Value<'c> {
        let name = match half {
            Half::Bf16 => "llvm.nvvm.ff2bf16x2.rn",
            Half::F16 => "llvm.nvvm.ff2f16x2.rn",
        };
        built(self.writer.build_bit_cast(self.value(name, &[], &[high, low]), self.context.i32_type(), ""))
    }

    /// The bits of an f32, or of a word that holds one, rounded to tf32: ties away from zero.
    pub fn round_tf32(&self, x: Value<'c>) -> Value<'c> {
        self.value("llvm.nvvm.f2tf32.rna", &[], &[self.convert(Convert::Bits(Lane::F32), x)])
    }

    /// Stores two neighbouring f32 to memory, at a multiple of 8 bytes.
    pub fn store_two(&self, to: Pointer<'c>, values: [Value<'c>; 2]) {
        let BasicTypeEnum::FloatType(ty) = values[0].get_type() else { unreachable!("invariant: the values are floats") };
        let vector = values
            .iter()
            .enumerate()
            .fold(ty.vec_type(2).get_undef(), |vector, (k, value)| built(self.writer.build_insert_element(vector, *value, self.word(k as i64), "")));
        built(self.writer.build_store(to, vector));
    }

    /// Stores one element of each lane, where the lane's pointer says.
    pub fn store_each(&self, to: Pointer<'c>, value: Value<'c>, lane: Lane) {
        self.scatter(to, self.i64(0), value, lane, None);
    }

    /// A 32-bit number of shared memory.
    pub fn load_shared_word(&self, address: Index<'c>) -> Index<'c> {
        self.convert(Convert::Bits(Lane::I32), self.load_shared(address, 1)[0]).into_int_value()
    }

    /// The least of the lanes' signed 32-bit numbers, in all lanes.
    pub fn least_of_warp(&self, x: Value<'c>) -> Value<'c> {
        self.value("llvm.nvvm.redux.sync.min", &[], &[x, self.word(-1).into()])
    }

    /// The greatest of the lanes' signed 32-bit numbers, in all lanes.
    pub fn greatest_of_warp(&self, x: Value<'c>) -> Value<'c> {
        self.value("llvm.nvvm.redux.sync.max", &[], &[x, self.word(-1).into()])
    }

    /// A word whose bit l says whether the mask has lane l.
    pub fn ballot(&self, mask: Value<'c>) -> Index<'c> {
        self.value("llvm.nvvm.vote.ballot.sync", &[], &[self.word(-1).into(), mask]).into_int_value()
    }

    /// How many bits are set.
    pub fn count_ones(&self, word: Index<'c>) -> Index<'c> {
        self.value("llvm.ctpop", &[word.get_type().into()], &[word.into()]).into_int_value()
    }
}
