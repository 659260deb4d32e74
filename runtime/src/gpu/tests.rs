use super::*;
use crate::artifact::{self, AcceptedArtifacts, ArtifactParts, Kernels};
use crate::comm::{CommError, Communicator, Exchange, Message, Progress};
use crate::executor::{CommandOrder, Rank, Step};
use crate::fixture::{self, Split};
use crate::target::Target;
use ir::launch::{Launch, MAP_BYTES, Parameter};
use ir::program::Action;
use ir::program::ProgramPhase;
use std::collections::BTreeSet;

/// A card that is connected, and keeps what it is told.
struct RecordingCard(Arc<Mutex<Vec<Work>>>, u64);

impl GpuDevice for RecordingCard {
    fn allocate(&mut self, _: u64) -> Result<u64, String> {
        self.1 += 1 << 20;
        Ok(self.1)
    }
    fn lend(&mut self, _: &mut [u8]) -> Result<(), String> {
        Err("it has no kernels of the host".into())
    }
    fn write(&self, _: Queue, _: u64, _: &[u8]) -> Result<(), String> {
        Err("nothing communicates beside it".into())
    }
    fn read(&self, queue: Queue, _: u64, out: &mut [u8]) -> Result<(), String> {
        assert_eq!(queue, Queue::Compute);
        out.fill(0);
        Ok(())
    }
    fn encode(&self, _: &TensorMap, _: u64) -> Result<[u8; MAP_BYTES], String> {
        Err("its kernels have no tensor maps".into())
    }
    fn run(&self, work: &[Work], _: Option<&HostKernels>) -> Result<(), String> {
        self.0.lock().unwrap().extend_from_slice(work);
        Ok(())
    }
    fn is_connected(&self) -> bool {
        true
    }
    fn synchronize(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Nobody asks it.
struct UnusedCommunicator;

impl Communicator for UnusedCommunicator {
    fn collective(&mut self, _: &mut dyn Memory, _: &[u64], _: &Exchange) -> Result<Progress, CommError> {
        unreachable!("the card exchanges by itself")
    }
    fn send(&mut self, _: &mut dyn Memory, _: u64, _: &Message) -> Result<Progress, CommError> {
        unreachable!("the card exchanges by itself")
    }
    fn recv(&mut self, _: &mut dyn Memory, _: u64, _: &Message) -> Result<Progress, CommError> {
        unreachable!("the card exchanges by itself")
    }
}

#[test]
fn a_connected_card_is_told_launches_exchanges_and_events_in_the_order_of_issue() {
    let job = fixture::streamed(fixture::job(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 }));
    let dir = tempfile::tempdir().unwrap();
    let entry = |k: &Kernel| {
        let arguments = (0..(k.inputs.len() + k.outputs.len()) as u32).map(Parameter::Argument);
        let parameters = arguments.chain([Parameter::Scratch]).collect();
        let launch = Launch { grid: 1, resident: None, cluster: 1, block: 32, shared_bytes: 0, scratch_bytes: 0, maps: vec![], parameters };
        KernelEntry { name: k.name(), tiles: 1, scratch_bytes: 0, launch: Some(launch) }
    };
    let entries: Vec<KernelEntry> = job.kernels.iter().map(entry).collect();
    let modules = vec![b"".as_slice(); entries.len()];
    let kernels = Some(Kernels { entries: &entries, library: None, ptx: &modules, cubins: &[] });
    let out = dir.path().join("gpu.mcc");
    artifact::write(&out, &ArtifactParts { job: &job, target: &Target::Gpu { arch: "sm_80".into(), host: None }, kernels, dumps: &[], sign: None })
        .unwrap();
    let artifact = artifact::read(&out, &AcceptedArtifacts::Anyones).unwrap();

    let told = Arc::new(Mutex::new(vec![]));
    let gpu = Gpu::new(&artifact, RecordingCard(told.clone(), 0), arena_bytes(&job, 0), None, &Threads::one()).unwrap();
    let mut rank = Rank::new(&job, 0, gpu, CommandOrder::List);
    let inputs = fixture::inputs();
    let batch: Vec<_> = job.inputs.iter().map(|i| inputs[&i.name].clone()).collect();
    let step = Step { number: 1, learning_rate: 0.5, loss_scale: 1.0, seed: 0, batch: &batch };
    rank.begin(ProgramPhase::Train);
    rank.advance(&step, &mut UnusedCommunicator).unwrap();
    rank.device.synchronize().unwrap();

    let program = &job.programs[0];
    let calls = &job.stages[0].schedule.train;
    let commands = || calls.iter().flat_map(|c| program.commands(c).map(|(_, c)| c));
    let issued: Vec<_> = commands()
        .filter_map(|c| match &c.action {
            Action::Launch { .. } => Some((c.stream, "launch")),
            Action::Collective { .. } => Some((c.stream, "exchange")),
            Action::Record { .. } => Some((c.stream, "record")),
            Action::Wait { .. } => Some((c.stream, "wait")),
            _ => None,
        })
        .collect();
    let told = told.lock().unwrap();
    let got: Vec<_> = told
        .iter()
        .filter_map(|w| match w {
            Work::Launch { .. } => Some((w.stream(), "launch")),
            Work::Exchange { .. } => Some((w.stream(), "exchange")),
            Work::Record { .. } => Some((w.stream(), "record")),
            Work::Wait { .. } => Some((w.stream(), "wait")),
            Work::Fill { .. }
            | Work::Write { .. }
            | Work::Copy { .. }
            | Work::Disk { .. }
            | Work::Host { .. }
            | Work::Post { .. }
            | Work::Send(_) => None,
        })
        .collect();
    assert_eq!(got, issued);
    assert!(got.iter().any(|(stream, what)| *what == "exchange" && *stream != Stream::Compute), "{got:?}");

    let mut recorded = BTreeSet::new();
    for work in told.iter() {
        match work {
            Work::Record { event, .. } => {
                recorded.insert(*event);
            }
            Work::Wait { event, .. } => assert!(recorded.contains(event), "event {event} was never recorded"),
            Work::Exchange { exchange: CardExchange::Collective { members, from, to, .. }, .. } => {
                assert!(*members == [0] || *members == [0, 1], "{members:?}");
                assert!([from, to].iter().all(|a| (1 << 20..4 << 20).contains(*a)), "{from:#x}, {to:#x}");
            }
            // The last parameter is the scratch, which was allocated last.
            Work::Launch { parameters, .. } => assert_eq!(parameters[parameters.len() - 8..], (4u64 << 20).to_le_bytes()),
            Work::Exchange { .. } | Work::Post { .. } | Work::Send(_) => {}
            Work::Fill { .. } | Work::Write { .. } | Work::Copy { .. } | Work::Disk { .. } | Work::Host { .. } => {}
        }
    }
}
