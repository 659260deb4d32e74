//! Races on global memory, within a block and between blocks: kernels that are ordered, and what is found as soon as
//! what orders them is gone.

use super::{all_options, bytes, text, upload, words};
use emulator::{Device, Launch, LaunchError, Options, Ranges, Wrong};

/// Runs a kernel of so many blocks of 64 threads on 1,024 words.
fn run(body: &str, blocks: u32, options: Options) -> Result<(Vec<u32>, Ranges), LaunchError> {
    let mut device = Device::new(Options { limit: 1 << 16, ..options });
    let module = device.load(&text(body)).unwrap_or_else(|e| panic!("{e}"));
    let p = upload(&mut device, &bytes(&[0u32; 1024], u32::to_le_bytes));
    let launch = Launch { grid: [blocks, 1, 1], threads: [64, 1, 1], shared: 0 };
    let (_, mut ranges) = device.launch_watched(module.kernel("k").expect("it is there"), launch, &p.to_le_bytes())?;
    ranges.read.iter_mut().chain(&mut ranges.written).for_each(|r| *r = r.map(|a| a - p));
    Ok((words(&device, p, 1024), ranges))
}

fn race(body: &str, blocks: u32, options: Options) -> (u32, String) {
    match run(body, blocks, options) {
        Err(LaunchError::Fault(f)) if matches!(f.wrong, Wrong::Race { space: "global", .. }) => (f.line, f.to_string()),
        other => panic!("{options:?}: a race on global memory is not found: {other:?}"),
    }
}

/// Checks that a kernel is right in every timing, and has a race in every timing without any one line that orders
/// something.
fn check(body: &str, blocks: u32, ordering: &[&str]) {
    for options in all_options() {
        run(body, blocks, options).unwrap_or_else(|e| panic!("{options:?}: {e}"));
        assert!(!ordering.is_empty());
        for line in ordering {
            assert!(body.contains(line), "{line}");
            race(&body.replacen(line, "", 1), blocks, options);
        }
    }
}

#[test]
fn warps_are_ordered_by_barriers() {
    // Each thread reads what a thread of the other warp has written.
    let body = "
        st.global.u32 [%d1], %r0;
        bar.sync 0;
        xor.b32 %r1, %r0, 32;
        mul.wide.u32 %d2, %r1, 4;
        add.u64 %d2, %d2, %d0;
        ld.global.u32 %r2, [%d2];
        st.global.u32 [%d1+256], %r2;";
    check(body, 1, &["bar.sync 0;"]);
    let (out, ranges) = run(body, 1, Options::default()).expect("it is right");
    assert_eq!(out[64..128], (0..64).map(|k| k ^ 32).collect::<Vec<u32>>());
    assert_eq!(ranges, Ranges { read: vec![], written: vec![[0, 512]] });
    let (line, said) = race(&body.replace("bar.sync 0;", ""), 1, Options::default());
    let lines: Vec<String> = text(&body.replace("bar.sync 0;", "")).lines().map(String::from).collect();
    let [store, load] = ["st.global.u32 [%d1], %r0;", "ld.global"].map(|s| 1 + lines.iter().position(|l| l.contains(s)).expect("it is there") as u32);
    assert!(line == load && said.contains(&format!("write of warp 1 itself, line {store},")) || line == store, "{said}");
}

#[test]
fn warps_are_ordered_by_mbarriers() {
    let body = "
        .shared .align 8 .b8 bar[8];
        mov.u32 %r1, bar;
        setp.ne.u32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared::cta.b64 [%r1], 32;
        bar.sync 0;
        setp.gt.u32 %p2, %r0, 31;
        @%p2 bra SECOND;
        st.global.u32 [%d1], %r0;
        mbarrier.arrive.shared::cta.b64 _, [%r1];
        bra END;
    SECOND:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;
        @!%p3 bra SECOND;
        ld.global.u32 %r2, [%d1+-128];
        st.global.u32 [%d1], %r2;
    END:";
    let without = body.replace("        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;\n        @!%p3 bra SECOND;\n", "");
    for options in all_options() {
        run(body, 1, options).unwrap_or_else(|e| panic!("{options:?}: {e}"));
        race(&without, 1, options);
    }
}

#[test]
fn neighbouring_bytes_are_no_race() {
    let body = "
        add.u64 %d2, %d0, 0;
        cvt.u64.u32 %d3, %r0;
        add.u64 %d2, %d2, %d3;
        st.global.u8 [%d2], %r0;";
    check(&format!("{body}\nbar.sync 0;\nld.global.u32 %r2, [%d0];\nst.global.u32 [%d1+256], %r2;"), 1, &["bar.sync 0;"]);
}

/// Computes the address of each block's own part of 256 bytes.
const OWN: &str = "mov.u32 %r5, %ctaid.x;\nmul.wide.u32 %d2, %r5, 256;\nadd.u64 %d3, %d1, %d2;\n";

#[test]
fn nothing_orders_blocks() {
    let parts = format!("{OWN}st.global.u32 [%d3], %r0;\n");
    let (_, ranges) = run(&parts, 4, Options::default()).expect("parts are apart");
    assert_eq!(ranges, Ranges { read: vec![], written: vec![[0, 1024]] });
    let (_, ranges) = run(&format!("{parts}ld.global.u32 %r3, [%d0+2048];\n"), 4, Options::default()).expect("all may read");
    assert_eq!(ranges.read, [[2048, 2052]]);
    for (wrong, others) in [
        ("st.global.u32 [%d1], %r0;", "write of warp"),
        // A barrier orders the threads of one block only.
        ("bar.sync 0;\nld.global.u32 %r3, [%d1];", "write of warp 0"),
        ("xor.b32 %r6, %r5, 1;\nmul.wide.u32 %d4, %r6, 256;\nadd.u64 %d4, %d4, %d1;\nld.global.u32 %r3, [%d4];", "of block"),
    ] {
        for options in all_options() {
            let (line, said) = race(&format!("{parts}{wrong}\n"), 4, options);
            assert!(line > 10 && said.contains(others) && said.contains("block ("), "{said}");
        }
    }
}

#[test]
fn the_last_block_may_read_what_a_counter_says_is_there() {
    // Each block leaves a sum. The block that counts last adds them and overwrites the first one.
    let body = format!(
        "{OWN}
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        st.global.u32 [%d3], 7;
        membar.gl;
        atom.global.add.u32 %r6, [%d0+2048], 1;
        membar.gl ;
        setp.ne.u32 %p2, %r6, 3;
        @%p2 bra END;
        ld.global.u32 %r7, [%d0+256];
        ld.global.u32 %r8, [%d0+768];
        add.u32 %r7, %r7, %r8;
        st.global.u32 [%d0], %r7;
    END:"
    );
    // With one host thread, blocks run one after the other, so the last one is the one that reads.
    for options in all_options() {
        let options = Options { threads: 1, ..options };
        assert_eq!(run(&body, 4, options).unwrap_or_else(|e| panic!("{options:?}: {e}")).0[0], 14);
        for fence in ["membar.gl;", "membar.gl ;"] {
            race(&body.replacen(fence, "", 1), 4, options);
        }
        let released = body.replacen("membar.gl;", "", 1).replacen("membar.gl ;", "", 1);
        run(&released.replace("atom.global", "atom.acq_rel.gpu.global"), 4, options).unwrap_or_else(|e| panic!("{options:?}: {e}"));
        race(&released.replace("atom.global", "atom.release.gpu.global"), 4, options);
        race(&released.replace("atom.global", "atom.acquire.gpu.global"), 4, options);
    }
}

#[test]
fn atomics_race_with_plain_accesses_alone() {
    let count = "red.global.add.u32 [%d0+2048], 1;\n";
    for options in all_options() {
        assert_eq!(run(count, 4, options).expect("atomics do not race").0[512], 256);
        race(&format!("{count}ld.global.u32 %r3, [%d0+2048];\n"), 4, options);
        run(&format!("{count}ld.relaxed.gpu.global.u32 %r3, [%d0+2048];\n"), 4, options).expect("a strong load does not race");
        race(&format!("{count}st.global.u32 [%d0+2048], 0;\n"), 4, options);
    }
}

#[test]
fn bulk_stores_are_there_once_they_are_waited_for() {
    let body = "
        .shared .align 128 .b8 s[256];
        mov.u32 %r1, s;
        shl.b32 %r2, %r0, 2;
        add.u32 %r2, %r2, %r1;
        st.shared.u32 [%r2], %r0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra MEET;
        cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    MEET:
        bar.sync 1;
        ld.global.u32 %r3, [%d1];
        st.global.u32 [%d1+256], %r3;";
    let early = body.replace("wait_group 0", "wait_group.read 0");
    for options in all_options() {
        assert_eq!(run(body, 1, options).unwrap_or_else(|e| panic!("{options:?}: {e}")).0[64..128], (0..64).collect::<Vec<u32>>());
        race(&early, 1, options);
    }
}

#[test]
fn it_can_be_left_unwatched() {
    let options = Options { global_races: false, ..Options::default() };
    let (_, ranges) = run("st.global.u32 [%d1], %r0;", 4, options).expect("nobody looks");
    assert_eq!(ranges, Ranges::default());
}
