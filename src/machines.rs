//! `mcc machine`, and the machine files of other commands.

use crate::cli::MachineCommand;
use crate::failure::Failure;
use crate::misuse::misuse;
use crate::print::out;
use simulate::machine::{KNOWN, Machine};
use std::fs;
use std::path::Path;

/// A machine file, or a machine that is known by name.
///
/// # Errors
/// No such file or name; a file that is no machine's.
pub fn read(machine: &str) -> Result<Machine, Failure> {
    if !Path::new(machine).is_file()
        && let Some(known) = Machine::named(machine)
    {
        return Ok(known);
    }
    let text = fs::read_to_string(machine).map_err(|e| {
        let names = KNOWN.map(|k| format!("`{}`", k.0)).join(", ");
        misuse!("machine file `{machine}` cannot be read: {e}; known by name are {names}, and `mcc machine show NAME` prints one to change")
    })?;
    Machine::parse(&text).map_err(|e| misuse!("`{machine}` is no machine file: {e}; `mcc machine show a100-80g-dgx` prints one").into())
}

pub fn run(command: &MachineCommand) -> Result<(), Failure> {
    match command {
        MachineCommand::Ls => {
            for (name, _) in KNOWN {
                let machine = Machine::named(name).expect("invariant: it is known");
                let note = machine.note.map_or(String::new(), |n| format!("; {n}"));
                out!("{name:<14} {} of {}, for {}{note}\n", machine.devices, machine.name, machine.target)?;
            }
        }
        MachineCommand::Show { name } => {
            let known = KNOWN.iter().find(|k| k.0 == name);
            let (_, text) = known.ok_or_else(|| misuse!("no machine is called `{name}`: `mcc machine ls` lists those that are known"))?;
            out!("{text}")?;
        }
        MachineCommand::Check { machines } => {
            for name in machines {
                let machine = read(name)?;
                let numbers = machine.numbers();
                let kernels: Vec<_> = machine.measured.iter().flat_map(|m| m.kernels.values()).collect();
                out!("{name}: {}, {} numbers\n", machine.name, numbers.len() + kernels.len())?;
                for (key, source) in &machine.sources {
                    let own = numbers.iter().filter(|n| n.figure.source == *key).count();
                    let tiles = machine.device.products.tiles.iter().filter(|t| t.source == *key).count();
                    let kernels = kernels.iter().filter(|k| k.source == *key).count();
                    out!("  {:>3} of {} ({})\n", own + tiles + kernels, source.title, source.date)?;
                }
            }
        }
    }
    Ok(())
}
