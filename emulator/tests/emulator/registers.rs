//! `setmaxnreg`: registers that warps give back and get.

use super::{all_options, bytes, text, upload};
use emulator::{Device, Launch, LaunchError, Options, Wrong};

/// Three groups of four warps: the last gives up registers, the first two get more. At launch each thread has 168.
const ROLES: &str = "
    setp.ge.u32 %p1, %r0, 256;
    @%p1 bra FEWER;
    setmaxnreg.inc.sync.aligned.u32 240;
    bra END;
FEWER:
    setmaxnreg.dec.sync.aligned.u32 24;
END:";

fn run(body: &str, bound: &str, options: Options) -> Result<(), LaunchError> {
    let mut device = Device::new(options);
    let module = device.load(&text(body).replace(") {", &format!(") {bound} {{"))).unwrap_or_else(|e| panic!("{e}"));
    let p = upload(&mut device, &bytes(&[0u32; 384], u32::to_le_bytes));
    let blocks = if bound.contains("cluster") { 2 } else { 1 };
    let launch = Launch { grid: [blocks, 1, 1], threads: [384, 1, 1], shared: 0 };
    device.launch(module.kernel("k").expect("it is there"), launch, &p.to_le_bytes()).map(drop)
}

fn wrong(body: &str, bound: &str, options: Options) -> Wrong {
    match run(body, bound, options) {
        Err(LaunchError::Fault(f)) => f.wrong,
        other => panic!("nothing is found: {other:?}"),
    }
}

#[test]
fn who_wants_more_waits_until_others_have_given_up_theirs() {
    for options in all_options() {
        run(ROLES, ".maxntid 384", options).unwrap_or_else(|e| panic!("{options:?}: {e}"));
        // Blocks of a cluster have registers of their own.
        run(ROLES, ".maxntid 384 .reqnctapercluster 2", options).unwrap_or_else(|e| panic!("{options:?}: {e}"));
        run(ROLES, ".maxnreg 168", options).unwrap_or_else(|e| panic!("{options:?}: {e}"));
        let without = ROLES.replace("setmaxnreg.dec.sync.aligned.u32 24;", "");
        let Wrong::Deadlock(who) = wrong(&without, ".maxntid 384", options) else { panic!("{options:?}: no deadlock") };
        assert_eq!(who.len(), 8);
        assert!(who[0].starts_with("warp 0 waits at line 13 for 240 registers a thread: of the 2016"), "{who:?}");
        assert!(who[0].ends_with("0 are free"), "{who:?}");
        // Too few registers are given up for both groups, so only some warps get theirs.
        let Wrong::Deadlock(who) = wrong(&ROLES.replace("u32 24;", "u32 40;"), ".maxntid 384", options) else { panic!("no deadlock") };
        assert_eq!(who.len(), 1, "{who:?}");
    }
}

#[test]
fn counts_that_cannot_be_are_refused() {
    let said = |body: &str, bound: &str| wrong(body, bound, Options::default()).to_string();
    assert!(said(ROLES, "").contains("needs `.maxnreg`"));
    assert!(said(ROLES, ".maxnreg 64").contains("deadlock") || said(ROLES, ".maxnreg 64").contains("no warp can go on"));
    assert!(said(&ROLES.replace("inc.sync.aligned.u32 240", "inc.sync.aligned.u32 160"), ".maxntid 384").contains("fewer than the 168"));
    assert!(said(&ROLES.replace("dec.sync.aligned.u32 24", "dec.sync.aligned.u32 176"), ".maxntid 384").contains("more than the 168"));
    assert!(said(&ROLES.replace("ge.u32 %p1, %r0, 256", "ge.u32 %p1, %r0, 272"), ".maxntid 384").contains("for all lanes together"));
    let mut device = Device::default();
    for count in [16, 264, 100] {
        let error = device.load(&text(&ROLES.replace("u32 24;", &format!("u32 {count};")))).expect_err("no such count");
        assert!(error.message.contains("24 to 256 registers, in eights"), "{error}");
    }
}
