use super::*;
use crate::executor::{CommandOrder, PersistentId, Rank, Step, arena_bytes};
use crate::fixture::{self, Split};
use crate::host::{Tensor, Whole};
use crate::loopback::{Hub, TurnOrder, run_phase};
use ir::program::ProgramPhase;

/// The fixture's kernels by hand, for 8 rows and 4 columns.
mod kernels {
    const ROWS: usize = crate::fixture::BATCH as usize;
    const COLUMNS: usize = crate::fixture::INS as usize + 1;
    include!("../../tests/fixture/kernels.rs");
}

fn library() -> KernelLibrary {
    let loaded = |function: KernelFn, tiles| NativeKernel { function, tiles, scratch_bytes: 0 };
    let (rows, columns) = (fixture::BATCH, fixture::INS + 1);
    let list = vec![
        loaded(kernels::k_product, rows),
        loaded(kernels::k_loss, 1),
        loaded(kernels::k_gradient, columns),
        loaded(kernels::k_squares, 1),
        loaded(kernels::k_root, 1),
        loaded(kernels::k_update, columns),
    ];
    // SAFETY: the kernels do what the fixture's signatures say.
    unsafe { KernelLibrary::linked(list) }
}

/// New parameters after some steps.
fn train(threads: &Threads, steps: u64) -> Vec<f64> {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let device = Cpu::new(&job.kernels, library(), arena_bytes(&job, 0), None, threads).unwrap();
    let (params, inputs) = (fixture::params(), fixture::inputs());
    let batch: Vec<Tensor> = job.inputs.iter().map(|i| inputs[&i.name].clone()).collect();
    let mut ranks = [Rank::new(&job, 0, device, CommandOrder::List)];
    ranks[0].initialise(|held| match held {
        PersistentId::Param(p) => Some(&params[&job.params[p as usize].name] as &dyn Whole),
        PersistentId::State(..) | PersistentId::Table(_) => None,
    });
    let mut hub = Hub::new(&job);
    for number in 1..=steps {
        let step = Step { number, learning_rate: 0.25, loss_scale: 1.0, seed: 0, batch: &batch };
        run_phase(&job, &mut ranks, &mut hub, ProgramPhase::Train, &step, &mut TurnOrder::Long).unwrap();
        run_phase(&job, &mut ranks, &mut hub, ProgramPhase::Update, &step, &mut TurnOrder::Long).unwrap();
        if number == 1 {
            assert_eq!(ranks[0].reports()[0], None);
        }
    }
    let mut out = vec![];
    ranks[0].collect(|held, _, values| {
        if let PersistentId::Param(_) = held {
            out.extend_from_slice(values);
        }
    });
    out
}

#[test]
fn native_kernels_train_like_interpreted_ones() {
    assert_eq!(train(&Threads::one(), 1), fixture::expected(0.25).2);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let one = train(&Threads::one(), 40);
    for (count, spins) in [(2, 0), (3, 50), (4, 5000)] {
        let many = train(&Threads { count, cores: None, spins }, 40);
        assert!(one.iter().zip(&many).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn denormals_are_flushed_on_the_rank_s_thread() {
    std::thread::spawn(|| {
        flush_denormals();
        assert_eq!(std::hint::black_box(f32::MIN_POSITIVE) / std::hint::black_box(2.0), 0.0);
    })
    .join()
    .unwrap();
}

#[test]
fn elements_round_to_nearest_in_every_dtype() {
    let round = |dtype: DType, x: f64| {
        let mut bytes = vec![0; dtype.bytes() as usize];
        encode(dtype, x, &mut bytes);
        decode(dtype, &bytes)
    };
    assert_eq!(round(DType::F32, 0.1), f64::from(0.1f32));
    assert_eq!(round(DType::I32, -7.0), -7.0);
    assert_eq!(round(DType::Bf16, 1.0 + 1.0 / 1024.0), 1.0);
    assert_eq!(round(DType::F16, 1.0 + 1.0 / 1024.0), 1.0 + 1.0 / 1024.0);
    assert_eq!(round(DType::Bool, 2.0), 1.0);
}
