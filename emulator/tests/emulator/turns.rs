//! Numbers that blocks take from a counter.

use super::{bytes, text, upload, words};
use emulator::{Counts, Device, Launch, Options};

const BLOCKS: u32 = 3;
const TILES: u32 = 11;

/// Every block writes its number to its tiles, and takes their numbers from a counter before. Returns who computed
/// which tile, what is left of the counter, and the counts of these blocks.
fn owners(options: Options, some: Option<&[usize]>) -> (Vec<u32>, u32, Counts) {
    let body = format!(
        "mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %nctaid.x;
    AGAIN:
        setp.ge.u32 %p1, %r2, {TILES};
        @%p1 bra END;
        add.u32 %r4, %r2, 1;
        mul.wide.u32 %d2, %r4, 4;
        add.u64 %d2, %d2, %d1;
        st.global.u32 [%d2], %r1;
        atom.relaxed.gpu.global.inc.u32 %r2, [%d1], {};
        add.u32 %r2, %r2, %r3;
        bra.uni AGAIN;
    END:
        ",
        TILES - 1
    );
    let mut device = Device::new(Options { threads: 1, ..options });
    let module = device.load(&text(&body)).unwrap_or_else(|e| panic!("{e}"));
    let p = upload(&mut device, &bytes(&[[0].as_slice(), &[99; TILES as usize]].concat(), u32::to_le_bytes));
    let launch = Launch { grid: [BLOCKS, 1, 1], threads: [1, 1, 1], shared: 0 };
    let ran = device.launch_some(module.kernel("k").expect("it is there"), launch, &p.to_le_bytes(), some).unwrap_or_else(|e| panic!("{e}"));
    let all = words(&device, p, 1 + TILES as usize);
    (all[1..].to_vec(), all[0], ran.counts)
}

#[test]
fn blocks_take_what_is_there_and_leave_nothing() {
    // A block runs to its end before the next one begins, so it takes all tiles but the first ones of the others.
    assert_eq!(owners(Options::default(), None), (vec![0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0], 0, Counts::default()));
    let orders: Vec<Vec<u32>> = (1..9).map(|seed| owners(Options { seed, ..Options::default() }, None).0).collect();
    assert!((0..BLOCKS).all(|b| orders.iter().any(|o| o[3..].iter().all(|who| *who == b))), "a seed is an order of blocks: {orders:?}");
    // A launch that lacks a block leaves its number in the counter.
    assert_eq!(owners(Options::default(), Some(&[0, 1])).1, TILES - 1);
}

#[test]
fn blocks_that_take_turns_have_every_nth_tile() {
    let turns = Options { turns: true, count: true, ..Options::default() };
    let (all, left, counts) = owners(turns, None);
    assert_eq!((all, left), ((0..TILES).map(|t| t % BLOCKS).collect(), 0));
    assert_eq!((counts.counter_tiles.tiles, counts.counter_tiles.most), (TILES.into(), 4));
    let (one, left, counts) = owners(turns, Some(&[2]));
    assert_eq!((one, left), ((0..TILES).map(|t| if t % BLOCKS == 2 { 2 } else { 99 }).collect(), 0));
    assert_eq!((counts.counter_tiles.tiles, counts.counter_tiles.most), (3, 3));
}

#[test]
fn the_last_tiles_are_what_does_not_come_out_even() {
    let counter_tiles = |tiles, most, copies, last| emulator::CounterTiles { tiles, most, copies, takers: 2, last_tile_copies: last }.uneven();
    assert_eq!(counter_tiles(8, 4, 80, 20), 0.0, "four each");
    assert_eq!(counter_tiles(7, 4, 70, 20), 0.5 / 3.5, "the last one of the block with more, of tiles that are alike");
    assert_eq!(counter_tiles(7, 4, 70, 2), 1.0 / 70.0, "a short one");
    assert_eq!(counter_tiles(0, 0, 0, 0), 0.0);
}
