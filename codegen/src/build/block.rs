//! What kernels whose tile is a block's need beside [`Builder`]: shared memory, barriers, threads that differ, inline
//! assembly.
//!
//! The threads of a block compute a tile together. Numbers of threads and addresses in shared memory are 32-bit
//! [`Index`]es that may differ among lanes.

use super::asm::{Instruction, Results};
pub use super::instructions::Index;
use super::instructions::built;
use super::simt::{Simt, Value};
use super::{Builder, IntBinary, LoopBody};
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::types::{BasicMetadataTypeEnum, BasicTypeEnum};
use inkwell::values::{BasicMetadataValueEnum, IntValue, PointerValue};
use inkwell::{AddressSpace, IntPredicate};

/// A number of 32 bits that changes as the kernel runs: a register, wherever it is set.
#[derive(Clone, Copy, Debug)]
pub struct Variable<'c>(PointerValue<'c>);

const SHARED: u16 = 3;
/// Name and alignment of a block's dynamic shared memory.
const SHARED_NAME: &str = "block_memory";
const SHARED_ALIGN: u32 = 1024;

impl<'c> Simt<'c> {
    /// A constant of 32 bits.
    pub fn word(&self, n: i64) -> Index<'c> {
        self.context.i32_type().const_int(n as u64, true)
    }

    /// The lower 32 bits.
    pub fn narrow(&self, a: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_truncate(a, self.context.i32_type(), ""))
    }

    /// The same number in 64 bits.
    pub fn widen(&self, a: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_z_extend(a, self.context.i64_type(), ""))
    }

    /// An operation on two numbers of one width, 32 or 64 bits.
    pub fn bits(&self, op: IntBinary, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        self.int2(op, a.into(), b.into()).into_int_value()
    }

    /// The number of this thread in its block, 32 bits.
    pub fn thread(&self) -> Index<'c> {
        self.value("llvm.nvvm.read.ptx.sreg.tid.x", &[], &[]).into_int_value()
    }

    /// A number of 32 bits that is the same in all lanes, in a way that the assembler sees it.
    pub fn uniform(&self, a: Index<'c>) -> Index<'c> {
        self.broadcast(a.into(), self.index(0)).into_int_value()
    }

    /// The same: what `redux.sync` finds has one register for the whole warp, and so has what follows from it.
    pub fn of_warp(&self, a: Index<'c>) -> Index<'c> {
        self.value("llvm.nvvm.redux.sync.or", &[], &[a.into(), self.word(-1).into()]).into_int_value()
    }

    /// Whether `a < b`, both signed.
    pub fn less(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::SLT, a, b, ""))
    }

    /// Whether two numbers of one width are the same.
    pub fn equal(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::EQ, a, b, ""))
    }

    /// `yes` where the condition holds, else `no`.
    pub fn choose(&self, condition: IntValue<'c>, yes: Index<'c>, no: Index<'c>) -> Index<'c> {
        built(self.writer.build_select(condition, yes, no, "")).into_int_value()
    }

    /// The lesser, both signed.
    pub fn least(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        self.choose(self.less(a, b), a, b)
    }

    /// The greater, both signed.
    pub fn most(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        self.choose(self.less(a, b), b, a)
    }

    /// Does something where the condition holds.
    pub fn if_so(&self, condition: IntValue<'c>, f: impl FnOnce()) {
        self.when(condition.into(), &[], || {
            f();
            vec![]
        });
    }

    /// A variable that begins as `initial`, of 32 bits.
    pub fn variable(&self, initial: Index<'c>) -> Variable<'c> {
        let here = self.writer.get_insert_block().expect("invariant: a block is open");
        let entry = self.function().get_first_basic_block().expect("invariant: the function has a block");
        // LLVM makes a register only of what is allocated in the entry block.
        match entry.get_first_instruction() {
            Some(first) => self.writer.position_before(&first),
            None => self.writer.position_at_end(entry),
        }
        let place = built(self.writer.build_alloca(self.context.i32_type(), ""));
        self.writer.position_at_end(here);
        let variable = Variable(place);
        self.set(variable, initial);
        variable
    }

    /// A variable's value at this place of the kernel.
    pub fn get(&self, variable: Variable<'c>) -> Index<'c> {
        built(self.writer.build_load(self.context.i32_type(), variable.0, "")).into_int_value()
    }

    /// Gives a variable another value, of 32 bits.
    pub fn set(&self, variable: Variable<'c>, value: Index<'c>) {
        built(self.writer.build_store(variable.0, value));
    }

    /// Waits until a phase of this parity of an mbarrier has ended.
    pub fn wait(&self, barrier: Index<'c>, parity: Index<'c>) {
        self.wait_for(barrier, parity, false);
    }

    /// The same, and hears of what those did before that arrived, from other blocks of the cluster too if it says so.
    pub fn wait_for(&self, barrier: Index<'c>, parity: Index<'c>, of_cluster: bool) {
        let [again, after] = ["wait", "over"].map(|n| self.context.append_basic_block(self.function(), n));
        built(self.writer.build_unconditional_branch(again));
        self.writer.position_at_end(again);
        let over = self.asm(Instruction::TryWait { of_cluster }, &[barrier.into(), parity.into()])[0].into_int_value();
        built(self.writer.build_conditional_branch(self.equal(over, self.word(1)), after, again));
        self.writer.position_at_end(after);
    }

    /// Does one of two things.
    pub fn either(&self, condition: IntValue<'c>, yes: impl FnOnce(), no: impl FnOnce()) {
        let [then, other, join] = ["then", "else", "join"].map(|n| self.context.append_basic_block(self.function(), n));
        built(self.writer.build_conditional_branch(condition, then, other));
        self.writer.position_at_end(then);
        yes();
        built(self.writer.build_unconditional_branch(join));
        self.writer.position_at_end(other);
        no();
        built(self.writer.build_unconditional_branch(join));
        self.writer.position_at_end(join);
    }

    /// Does something with what `head` gives beside its condition, again and again, until that does not hold.
    pub fn as_long_as<T>(&self, head: impl FnOnce() -> (IntValue<'c>, T), body: impl FnOnce(T)) {
        let [again, inside, after] = ["again", "inside", "after"].map(|n| self.context.append_basic_block(self.function(), n));
        built(self.writer.build_unconditional_branch(again));
        self.writer.position_at_end(again);
        let (goes_on, given) = head();
        built(self.writer.build_conditional_branch(goes_on, inside, after));
        self.writer.position_at_end(inside);
        body(given);
        built(self.writer.build_unconditional_branch(again));
        self.writer.position_at_end(after);
    }

    /// `for i in (range[0]..range[1]).step_by(range[2])`, of numbers of either width, with values carried along.
    pub fn loop_over(&self, range: [Index<'c>; 3], carried: &[Value<'c>], body: &mut LoopBody<'_, Index<'c>, Value<'c>>) -> Vec<Value<'c>> {
        self.counted(range, carried, body)
    }

    /// An element of global memory at an address, as a number.
    pub fn address(&self, pointer: PointerValue<'c>) -> Index<'c> {
        let global = built(self.writer.build_address_space_cast(pointer, self.context.ptr_type(AddressSpace::from(super::simt::GLOBAL)), ""));
        built(self.writer.build_ptr_to_int(global, self.context.i64_type(), ""))
    }

    /// The start of the block's dynamic shared memory.
    pub fn shared(&self) -> Index<'c> {
        let memory = self.module.get_global(SHARED_NAME).unwrap_or_else(|| {
            let memory = self.module.add_global(self.context.i8_type().array_type(0), Some(AddressSpace::from(SHARED)), SHARED_NAME);
            memory.set_alignment(SHARED_ALIGN);
            memory
        });
        built(self.writer.build_ptr_to_int(memory.as_pointer_value(), self.context.i32_type(), ""))
    }

    fn shared_at(&self, address: Index<'c>) -> PointerValue<'c> {
        built(self.writer.build_int_to_ptr(address, self.context.ptr_type(AddressSpace::from(SHARED)), ""))
    }

    /// Neighbouring f32 of shared memory, one or several, aligned to all of them.
    pub fn load_shared(&self, address: Index<'c>, count: usize) -> Vec<Value<'c>> {
        let float = self.context.f32_type();
        if count == 1 {
            return vec![built(self.writer.build_load(float, self.shared_at(address), ""))];
        }
        let vector = built(self.writer.build_load(float.vec_type(count as u32), self.shared_at(address), "")).into_vector_value();
        let at = |k| built(self.writer.build_extract_element(vector, self.word(k as i64), ""));
        (0..count).map(at).collect()
    }

    /// Stores neighbouring f32, or 32-bit numbers, to shared memory, aligned to all of them.
    pub fn store_shared(&self, address: Index<'c>, values: &[Value<'c>]) {
        if let [value] = values {
            built(self.writer.build_store(self.shared_at(address), *value));
            return;
        }
        let count = values.len() as u32;
        let mut vector = match values[0].get_type() {
            BasicTypeEnum::FloatType(ty) => ty.vec_type(count),
            other => other.into_int_type().vec_type(count),
        }
        .get_undef();
        for (k, value) in values.iter().enumerate() {
            vector = built(self.writer.build_insert_element(vector, *value, self.word(k as i64), ""));
        }
        built(self.writer.build_store(self.shared_at(address), vector));
    }

    /// A number of 2 or 4 bytes of global memory, as 32 bits.
    pub fn load_bits(&self, address: Index<'c>, bytes: i64) -> Index<'c> {
        let (pointer, int) = (self.global(address), self.context.i32_type());
        let ty = if bytes == 2 { self.context.i16_type() } else { int };
        let number = built(self.writer.build_load(ty, pointer, "")).into_int_value();
        built(self.writer.build_int_z_extend_or_bit_cast(number, int, ""))
    }

    /// Waits until all threads of the block have come here, and makes their writes visible to all of them. The lanes
    /// of a warp may have diverged, so they come together first.
    pub fn barrier(&self) {
        self.warp_barrier();
        self.call("llvm.nvvm.barrier.cta.sync.aligned.all", &[], &[self.word(0).into()]);
    }

    /// Waits until `threads` threads of the block have come here, and makes their writes visible to each other. They
    /// must be whole warps.
    pub fn barrier_of(&self, threads: i64) {
        self.barrier_of_team(self.word(0), threads);
    }

    /// The same in one of several teams of so many threads, by its number.
    pub fn barrier_of_team(&self, team: Index<'c>, threads: i64) {
        self.warp_barrier();
        let number = self.index_add(team, self.word(1));
        self.call("llvm.nvvm.barrier.cta.sync.aligned.count", &[], &[number.into(), self.word(threads).into()]);
    }

    /// An instruction of the table; its results.
    pub fn asm(&self, instruction: Instruction, arguments: &[Value<'c>]) -> Vec<Value<'c>> {
        let text = instruction.text();
        let types: Vec<BasicMetadataTypeEnum> = arguments.iter().map(|a| a.get_type().into()).collect();
        let several = |ty: BasicTypeEnum<'c>, count| self.context.struct_type(&vec![ty; count], false);
        let (ty, count) = match text.results {
            Results::Nothing => (self.context.void_type().fn_type(&types, false), 0),
            Results::Word => (self.context.i32_type().fn_type(&types, false), 1),
            Results::Words(n) => (several(self.context.i32_type().into(), n).fn_type(&types, false), n),
            Results::Floats(n) => (several(self.context.f32_type().into(), n).fn_type(&types, false), n),
        };
        let pointer = self.context.create_inline_asm(ty, text.template, text.constraints, true, false, None, false);
        let arguments: Vec<BasicMetadataValueEnum> = arguments.iter().map(|a| (*a).into()).collect();
        let call = built(self.writer.build_indirect_call(ty, pointer, &arguments, ""));
        // All lanes must execute the instruction together, so LLVM may not move it into divergent code.
        let convergent = Attribute::get_named_enum_kind_id("convergent");
        call.add_attribute(AttributeLoc::Function, self.context.create_enum_attribute(convergent, 0));
        match call.try_as_basic_value().basic() {
            Some(result) if text.results == Results::Word => vec![result],
            Some(results) => {
                let results = results.into_struct_value();
                (0..count).map(|k| built(self.writer.build_extract_value(results, k as u32, ""))).collect()
            }
            None => vec![],
        }
    }
}
