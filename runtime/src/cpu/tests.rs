use super::*;
use crate::comm::Phase;
use crate::executor::{Held, Rank, Step, arena_bytes};
use crate::fixture::{self, Split};
use crate::host::{Tensor, Whole};
use crate::loopback::{Hub, run_phase};

/// The fixture's kernels by hand, for 8 rows and 4 columns.
mod kernels {
    const ROWS: usize = fixture::BATCH as usize;
    const COLUMNS: usize = fixture::INS as usize + 1;
    use crate::fixture;

    unsafe fn operand<'a>(arguments: *const *mut u8, k: usize, n: usize) -> &'a mut [f32] {
        unsafe { std::slice::from_raw_parts_mut((*arguments.add(k)).cast(), n) }
    }

    /// One tile per row.
    pub unsafe extern "C" fn product(a: *const *mut u8, _: *const u64, first: u64, end: u64, _: *mut u8) {
        let (x, w) = unsafe { (operand(a, 0, ROWS * COLUMNS), operand(a, 1, COLUMNS)) };
        for row in first as usize..end as usize {
            let y = unsafe { &mut *(*a.add(2)).cast::<f32>().add(row) };
            *y = (0..COLUMNS).map(|i| x[row * COLUMNS + i] * w[i]).sum();
        }
    }

    pub unsafe extern "C" fn loss(a: *const *mut u8, _: *const u64, _: u64, _: u64, _: *mut u8) {
        let (y, t, d, sum) = unsafe { (operand(a, 0, ROWS), operand(a, 1, ROWS), operand(a, 2, ROWS), operand(a, 3, 1)) };
        for k in 0..ROWS {
            d[k] = (y[k] - t[k]) * 2.0 / ROWS as f32;
            sum[0] += (y[k] - t[k]).powi(2) / ROWS as f32;
        }
    }

    pub unsafe extern "C" fn gradient(a: *const *mut u8, _: *const u64, first: u64, end: u64, _: *mut u8) {
        let (x, d) = unsafe { (operand(a, 0, ROWS * COLUMNS), operand(a, 1, ROWS)) };
        for i in first as usize..end as usize {
            let g = unsafe { &mut *(*a.add(2)).cast::<f32>().add(i) };
            *g += (0..ROWS).map(|r| x[r * COLUMNS + i] * d[r]).sum::<f32>();
        }
    }

    pub unsafe extern "C" fn squares(a: *const *mut u8, _: *const u64, _: u64, _: u64, _: *mut u8) {
        let (g, sum) = unsafe { (operand(a, 0, COLUMNS), operand(a, 1, 1)) };
        sum[0] = g.iter().map(|x| x * x).sum();
    }

    pub unsafe extern "C" fn root(a: *const *mut u8, _: *const u64, _: u64, _: u64, _: *mut u8) {
        let y = unsafe { operand(a, 1, 1) };
        y[0] = y[0].sqrt();
    }

    pub unsafe extern "C" fn update(a: *const *mut u8, scalars: *const u64, first: u64, end: u64, _: *mut u8) {
        let rate = f64::from_bits(unsafe { *scalars }) as f32;
        for i in first as usize..end as usize {
            unsafe {
                let (w, v, g) = (&mut *(*a).cast::<f32>().add(i), &mut *(*a.add(1)).cast::<f32>().add(i), *(*a.add(2)).cast::<f32>().add(i));
                *v = *v / 2.0 + g;
                *w -= rate * *v;
            }
        }
    }
}

fn library() -> Library {
    let loaded = |function: KernelFn, tiles| Loaded { function, tiles, scratch_bytes: 0 };
    let (rows, columns) = (fixture::BATCH, fixture::INS + 1);
    let list = vec![
        loaded(kernels::product, rows),
        loaded(kernels::loss, 1),
        loaded(kernels::gradient, columns),
        loaded(kernels::squares, 1),
        loaded(kernels::root, 1),
        loaded(kernels::update, columns),
    ];
    // SAFETY: the kernels do what the fixture's signatures say.
    unsafe { Library::linked(list) }
}

/// New parameters after some steps.
fn train(threads: &Threads, steps: u64) -> Vec<f64> {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let device = Cpu::new(&job.kernels, library(), arena_bytes(&job.programs[0]), threads).unwrap();
    let (params, inputs) = (fixture::params(), fixture::inputs());
    let batch: Vec<Tensor> = job.inputs.iter().map(|i| inputs[&i.name].clone()).collect();
    let mut ranks = [Rank::new(&job, 0, device)];
    ranks[0].initialise(|held| match held {
        Held::Param(p) => Some(&params[&job.params[p as usize].name] as &dyn Whole),
        Held::State(..) | Held::Table(_) => None,
    });
    let mut hub = Hub::new(1);
    for number in 1..=steps {
        let step = Step { number, learning_rate: 0.25, seed: 0, batch: &batch };
        run_phase(&job, &mut ranks, &mut hub, Phase::Train, &step).unwrap();
        run_phase(&job, &mut ranks, &mut hub, Phase::Update, &step).unwrap();
        if number == 1 {
            assert_eq!(ranks[0].reports()[0], None);
        }
    }
    let mut out = vec![];
    ranks[0].collect(|held, _, values| {
        if let Held::Param(_) = held {
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
