//! What is wrong is found, with its line.

use super::{bytes, run, text, upload};
use emulator::{Device, Launch, LaunchError, Options, Wrong};

fn fault(body: &str) -> Wrong {
    run(body, 64, &[0; 64], Options::default()).expect_err("it is wrong").wrong
}

#[test]
fn memory_has_ends() {
    let wrong = run("add.u64 %d2, %d0, 256;\nst.global.u32 [%d2], 0;", 32, &[0; 64], Options::default()).expect_err("it is beyond the end");
    assert!(matches!(wrong.wrong, Wrong::OutOfBounds { space: "global", bytes: 4, .. }), "{wrong}");
    assert_eq!(wrong.line, 11);
    assert!(matches!(fault("ld.global.u32 %r1, [%d0+2];"), Wrong::Misaligned { .. }));
    assert!(matches!(fault(".shared .align 4 .b8 s[64];\nmov.u32 %r1, s;\nst.shared.u32 [%r1+64], 0;"), Wrong::OutOfBounds { space: "shared", .. }));
    assert!(matches!(fault("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0+8];"), Wrong::Misaligned { bytes: 16, .. }));
}

#[test]
fn what_nobody_wrote_is_nan() {
    let out =
        run(".shared .align 4 .b8 s[4];\nmov.u32 %r1, s;\nld.shared.u32 %r2, [%r1];\nst.global.u32 [%d1], %r2;", 32, &[0; 32], Options::default());
    assert_eq!(out.expect("it is poor, but not wrong"), [u32::MAX; 32]);
}

#[test]
fn lanes_must_meet() {
    let body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra A;\nbra B;\nA:\nbar.sync 0;\nB:";
    assert!(matches!(fault(body), Wrong::Divergent(_)));
    let body = "setp.lt.u32 %p1, %r0, 16;\n@!%p1 bra B;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\nB:";
    assert!(matches!(fault(body), Wrong::Divergent(_)));
}

/// With the option, it is not enough for lanes to meet at a join before what all lanes execute together.
#[test]
fn lanes_that_parted_are_brought_together() {
    let body = "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra MEET;\nst.global.u32 [%d0], 7;\nMEET:\nbar.warp.sync -1;\nbar.sync 0;";
    let (strict, without) = (Options { lanes: true, ..Options::default() }, body.replace("bar.warp.sync -1;\n", ""));
    assert!(run(body, 64, &[0; 64], strict).is_ok());
    assert!(run(&without, 64, &[0; 64], Options::default()).is_ok());
    let wrong = run(&without, 64, &[0; 64], strict).expect_err("nothing brings them together");
    assert!(wrong.wrong.to_string().ends_with("they parted at line 11, and no `bar.warp.sync` is between"), "{wrong}");
    // A barrier of some lanes does not bring all of them together.
    assert!(run(&body.replace("sync -1", "sync 65535"), 64, &[0; 64], strict).is_err());
    // An exchange of all lanes brings them together as well.
    assert!(run(&body.replace("bar.warp.sync -1", "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1"), 64, &[0; 64], strict).is_ok());
}

#[test]
fn who_waits_in_vain_is_named() {
    // Warp 0 waits at a barrier of 64 threads, and warp 1 waits at an mbarrier that expects two arrivals.
    let body = "
        .shared .align 8 .b8 bar[8];
        mov.u32 %r1, bar;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r1], 2;
    READY:
        bar.sync 0;
        setp.gt.u32 %p2, %r0, 31;
        @%p2 bra SECOND;
        bar.sync 1, 64;
    SECOND:
        @%p1 bra WAIT;
        mbarrier.arrive.shared::cta.b64 _, [%r1];
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;
        @!%p3 bra WAIT;";
    let wrong = fault(body);
    let Wrong::Deadlock(who) = &wrong else { panic!("{wrong}") };
    assert_eq!(who.len(), 2);
    assert!(who[0].starts_with("warp 0 waits at barrier 1"), "{who:?}");
    assert!(who[1].ends_with("2 of 2 arrivals and 0 bytes are missing"), "{who:?}");
    assert!(matches!(
        run("AGAIN: bra AGAIN;", 32, &[0; 32], Options { limit: 1000, ..Options::default() }).expect_err("it is endless").wrong,
        Wrong::Endless(1000)
    ));
}

#[test]
fn mbarriers_count() {
    let with = |body: &str| {
        format!(
            ".shared .align 8 .b8 bar[8];\nmov.u32 %r1, bar;\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra READY;\nmbarrier.init.shared::cta.b64 [%r1], 1;\nREADY:\nbar.sync 0;\n{body}"
        )
    };
    assert!(matches!(fault(&with("mbarrier.arrive.shared::cta.b64 _, [%r1], 2;")), Wrong::Barrier { .. }));
    assert!(matches!(fault("mov.u32 %r1, 0;\n.shared .align 8 .b8 bar[8];\nmbarrier.arrive.shared::cta.b64 _, [%r1];"), Wrong::Barrier { .. }));
    assert!(matches!(fault(&with("").replace("bar.sync 0;", "mbarrier.arrive.shared::cta.b64 _, [%r1];")), Wrong::Barrier { .. }));
}

#[test]
fn what_is_not_known_is_refused_by_line() {
    let mut device = Device::default();
    let error = |device: &mut Device, body: &str| device.load(&text(body)).expect_err("it is not supported");
    let found = error(&mut device, "\n\ntex.2d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%d0];");
    assert_eq!(found.line, 12);
    assert!(error(&mut device, "add.rz.f32 %f1, %f1, %f1;").message.contains("`.rz`"));
    assert!(error(&mut device, "bra NOWHERE;").message.contains("NOWHERE"));
    assert!(error(&mut device, "add.u32 %r1, %r2, %d0;").message.contains("does not fit"));
    assert!(error(&mut device, "call (%r1), f, (%r2);").message.contains("call"));
}

#[test]
fn launches_are_checked() {
    let mut device = Device::default();
    let module = device.load(&text("").replace(") {", ") .maxntid 64 {")).expect("it is PTX");
    let kernel = module.kernel("k").expect("it is there");
    let p = upload(&mut device, &bytes(&[0u32], u32::to_le_bytes)).to_le_bytes();
    let launch = Launch { grid: [1, 1, 1], threads: [32, 1, 1], shared: 0 };
    assert!(device.launch(kernel, launch, &p).is_ok());
    let refused = |launch: Launch, p: &[u8]| matches!(device.launch(kernel, launch, p), Err(LaunchError::Arguments { .. }));
    assert!(refused(launch, &p[..4]));
    assert!(refused(Launch { threads: [96, 1, 1], ..launch }, &p));
    assert!(refused(Launch { grid: [0, 1, 1], ..launch }, &p));
    assert!(refused(Launch { shared: 256 * 1024, ..launch }, &p));
}
