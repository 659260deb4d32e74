//! `setmaxnreg`: registers that warps of a block give back and get, out of what the block has (PTX ISA, section
//! 9.7.19).

use crate::block::{Block, Flow};
use crate::fault::Wrong;
use crate::warp::State;

impl Block<'_> {
    /// Changes a warp's registers to so many for each thread. A warp that wants more waits until the block has them:
    /// only warps that take fewer give any back, ones that end do not.
    pub fn set_registers(&mut self, w: usize, count: u32, more: bool, mask: u32) -> Result<Flow, Wrong> {
        self.converged(w, mask, "setmaxnreg")?;
        let kernel = self.kernel;
        let Some(launched) = kernel.registers_at_launch() else {
            let why = "`setmaxnreg` where nothing bounds the kernel's registers: it needs `.maxnreg`, `.maxntid` or `.reqntid`";
            return Err(Wrong::Undefined(why.into()));
        };
        let held = self.warps[w].held;
        if more && count < held || !more && count > held {
            let (verb, than) = if more { ("inc", "fewer") } else { ("dec", "more") };
            return Err(Wrong::Undefined(format!("`setmaxnreg.{verb}` to {count} registers, {than} than the {held} that the warp has")));
        }
        let block = self.of_block(w);
        let all = block.len() as u32;
        // Each of the other warps keeps at least 24 registers a thread, which one warp can never get.
        if more && count + 24 * (all - 1) > launched * all {
            return Err(Wrong::Undefined(format!("`setmaxnreg.inc` to {count} registers, where the block's {all} warps have {launched} each")));
        }
        let taken: u32 = self.warps[block.clone()].iter().map(|w| w.held).sum();
        if more && taken - held + count > launched * all {
            self.warps[w].state = State::Registers(count);
            return Ok(Flow::Moved);
        }
        self.warps[w].held = count;
        if count < held {
            self.warps[block].iter_mut().filter(|w| matches!(w.state, State::Registers(_))).for_each(|w| w.state = State::Running);
        }
        Ok(Flow::Next)
    }

    /// What a warp waits for that wants more registers.
    pub fn describe_pool(&self, w: usize, count: u32) -> String {
        let block = &self.warps[self.of_block(w)];
        let launched = self.kernel.registers_at_launch().unwrap_or(0) * block.len() as u32;
        let taken: u32 = block.iter().map(|w| w.held).sum();
        format!("{count} registers a thread: of the {launched} of the block's warps together {} are free", launched - taken)
    }
}
