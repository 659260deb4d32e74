//! Lanes that part and meet, and what they exchange.

use super::{all_options, run};

#[test]
fn lanes_part_and_meet_again() {
    // The kernel computes the length of the Collatz sequence of each lane's number, then the maximum over all lanes.
    let body = "
        ld.global.u32 %r1, [%d1];
        mov.u32 %r2, 0;
    AGAIN:
        setp.eq.u32 %p1, %r1, 1;
        @%p1 bra OVER;
        and.b32 %r3, %r1, 1;
        setp.eq.u32 %p2, %r3, 0;
        @%p2 bra EVEN;
        mad.lo.u32 %r1, %r1, 3, 1;
        bra.uni STEP;
    EVEN:
        shr.u32 %r1, %r1, 1;
    STEP:
        add.u32 %r2, %r2, 1;
        bra.uni AGAIN;
    OVER:
        st.global.u32 [%d1], %r2;
        redux.sync.max.u32 %r4, %r2, -1;
        setp.ne.u32 %p3, %r0, 0;
        @%p3 bra END;
        st.global.u32 [%d0+128], %r4;
    END:";
    let length = |mut n: u32| {
        let mut steps = 0;
        while n != 1 {
            n = if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        steps
    };
    let input: Vec<u32> = (1..=33).collect();
    let mut expected: Vec<u32> = (1..=32).map(length).collect();
    expected.push(*expected.iter().max().expect("there are 32"));
    for options in all_options() {
        assert_eq!(run(body, 32, &input, options).expect("it is right"), expected);
    }
}

#[test]
fn lanes_exchange() {
    let input: Vec<u32> = (0..32).map(|l| l * l).collect();
    let shuffled =
        |op: &str| run(&format!("ld.global.u32 %r1, [%d1];\n{op}\nst.global.u32 [%d1], %r2;"), 32, &input, Default::default()).expect("it is right");
    let square = |l: usize| (l * l) as u32;
    assert_eq!(shuffled("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;"), (0..32).map(|l| square(l ^ 5)).collect::<Vec<_>>());
    assert_eq!(shuffled("shfl.sync.down.b32 %r2, %r1, 3, 31, -1;"), (0..32).map(|l| square(if l + 3 < 32 { l + 3 } else { l })).collect::<Vec<_>>());
    assert_eq!(shuffled("shfl.sync.up.b32 %r2, %r1, 3, 0, -1;"), (0..32).map(|l| square(if l >= 3 { l - 3 } else { l })).collect::<Vec<_>>());
    // The mask 0x181F divides the lanes into segments of 8.
    assert_eq!(shuffled("shfl.sync.idx.b32 %r2, %r1, 2, 0x181F, -1;"), (0..32).map(|l| square(l / 8 * 8 + 2)).collect::<Vec<_>>());
    assert_eq!(shuffled("setp.gt.u32 %p1, %r1, 100; vote.sync.ballot.b32 %r2, %p1, -1;"), vec![0xFFFF_F800; 32]);
    assert_eq!(shuffled("elect.sync %r3|%p1, -1; selp.u32 %r2, 1, 0, %p1;"), (0..32).map(|l| u32::from(l == 0)).collect::<Vec<_>>());
}

#[test]
fn warps_meet_at_barriers() {
    // The kernel reverses 256 words through shared memory.
    let body = "
        .shared .align 4 .b8 buffer[1024];
        ld.global.u32 %r1, [%d1];
        mov.u32 %r2, buffer;
        shl.b32 %r3, %r0, 2;
        add.u32 %r4, %r2, %r3;
        st.shared.u32 [%r4], %r1;
        bar.sync 0;
        sub.u32 %r5, 1020, %r3;
        add.u32 %r5, %r5, %r2;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%d1], %r6;";
    let input: Vec<u32> = (0..256).collect();
    for options in all_options() {
        assert_eq!(run(body, 256, &input, options).expect("it is right"), (0..256).rev().collect::<Vec<_>>());
    }
    let fault = run(&body.replace("bar.sync 0;", ""), 256, &input, Default::default()).expect_err("the barrier is missing");
    assert!(matches!(fault.wrong, emulator::Wrong::Race { .. }), "{fault}");
}

#[test]
fn atomics_add_up() {
    let body = "
        .shared .align 4 .b8 sum[4];
        mov.u32 %r1, sum;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra READY;
        st.shared.u32 [%r1], 0;
    READY:
        bar.sync 0;
        atom.shared.add.u32 %r2, [%r1], %r0;
        red.global.max.u32 [%d0+4], %r0;
        bar.sync 0;
        @%p1 bra END;
        ld.shared.u32 %r3, [%r1];
        st.global.u32 [%d0], %r3;
    END:";
    for options in all_options() {
        assert_eq!(run(body, 128, &[0; 128], options).expect("it is right")[..2], [127 * 64, 127]);
    }
}
