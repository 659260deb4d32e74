//! Where a stream of a rank is in the order of issue.

use crate::comm::Position;
use crate::profile::{Clock, Log, Ran};
use crate::shm::TransferProgress;
use ir::program::ProgramPhase;
use ir::program::{Action, Call, CallSchedule, Command, Program, Stream};
use std::collections::VecDeque;

/// Walks through the commands of one stream, or of all of them as one list, phase after phase.
#[derive(Clone, Debug)]
pub struct Cursor {
    /// None: all commands, whatever their stream.
    stream: Option<Stream>,
    pub at: Position,
    /// How far the communication at its place is, if that was left under way.
    pub through: TransferProgress,
    /// Phases that it goes on to from the end of its own.
    later: VecDeque<ProgramPhase>,
    /// Records of each event that were issued before this place, on whatever stream.
    issued: Vec<u64>,
    /// What the stream does and when, if somebody wants to know.
    log: Option<Log>,
}

impl Cursor {
    pub fn new(program: &Program, stream: Option<Stream>) -> Cursor {
        let nowhere = Position { call: u32::MAX, ..Position::default() };
        Cursor { stream, at: nowhere, through: TransferProgress::default(), later: VecDeque::new(), issued: vec![0; events(program)], log: None }
    }

    pub fn stream(&self) -> Option<Stream> {
        self.stream
    }

    /// Goes on to a phase, once it is through those before.
    pub fn begin(&mut self, phase: ProgramPhase) {
        self.later.push_back(phase);
    }

    /// The next command of the stream in the phases that were begun, with its call. The cursor then stands at it.
    pub fn next<'a>(&mut self, program: &'a Program, schedule: &'a CallSchedule) -> Option<(&'a Call, &'a Command)> {
        loop {
            while let Some(call) = schedule.calls(self.at.phase).get(self.at.call as usize) {
                let body = &program.bodies[call.body.index()];
                let part = body.part(call.part);
                self.at.command = self.at.command.max(part.start as u32);
                while let Some(command) = body.commands[..part.end].get(self.at.command as usize) {
                    if self.stream.is_none_or(|s| s == command.stream) {
                        if let Some(log) = &mut self.log {
                            log.begin();
                        }
                        return Some((call, command));
                    }
                    self.skip(command);
                }
                (self.at.call, self.at.command) = (self.at.call + 1, 0);
            }
            self.at = Position { phase: self.later.pop_front()?, call: 0, command: 0 };
        }
    }

    /// Goes on behind the command that [`Cursor::next`] gave.
    pub fn pass(&mut self, command: &Command) {
        if let Some(log) = &mut self.log {
            log.end(self.at);
        }
        self.skip(command);
    }

    /// Goes on behind a command that was left out.
    pub fn leave_out(&mut self, command: &Command) {
        if let Some(log) = &mut self.log {
            log.leave_out();
        }
        self.skip(command);
    }

    fn skip(&mut self, command: &Command) {
        if let Action::Record { event } = command.action {
            self.issued[event as usize] += 1;
        }
        self.at.command += 1;
        self.through = TransferProgress::default();
    }

    /// From now on, notes when the stream comes to a command and when it is through. There is room for so many at
    /// first.
    pub fn watch(&mut self, room: usize, clock: Clock) {
        self.log = Some(Log::new(room, clock));
    }

    pub fn is_watched(&self) -> bool {
        self.log.is_some()
    }

    /// Ends [`Cursor::watch`] and gives what was noted, in order.
    pub fn watched(&mut self) -> Vec<Ran> {
        self.log.take().map(Log::ran).unwrap_or_default()
    }

    /// How often an event must have been reached for a wait here to end.
    pub fn due(&self, event: u32) -> u64 {
        self.issued[event as usize]
    }
}

/// The number of events of a program; they count from 0.
pub fn events(program: &Program) -> usize {
    let events = program.bodies.iter().flat_map(|b| &b.commands).filter_map(|c| match c.action {
        Action::Record { event } | Action::Wait { event } => Some(event as usize + 1),
        Action::Launch { .. }
        | Action::Copy { .. }
        | Action::Collective { .. }
        | Action::Send { .. }
        | Action::Recv { .. }
        | Action::Fill { .. }
        | Action::Load { .. }
        | Action::Report { .. }
        | Action::Limit { .. } => None,
    });
    events.max().unwrap_or(0)
}

/// The streams that a program uses, in the order of [`Stream::ALL`]: compute first, used or not.
pub fn streams(program: &Program) -> Vec<Stream> {
    let used = |s: &Stream| *s == Stream::Compute || program.bodies.iter().flat_map(|b| &b.commands).any(|c| c.stream == *s);
    Stream::ALL.into_iter().filter(used).collect()
}
