//! Clusters of blocks: what they write and copy into each other's shared memory, and what orders it.

use super::matmul::{hopper, run_hopper};
use super::{all_options, bytes, text, upload, words};
use emulator::{Device, Fault, Launch, LaunchError, Options, Wrong};

/// Runs a kernel on 4 blocks of 64 threads, two to a cluster. `%r30` is the block's rank, `%r31` the other's, and
/// `%d1` where the thread's word is.
fn run(body: &str, options: Options) -> Result<Vec<u32>, Box<Fault>> {
    let mut device = Device::new(options);
    let first =
        "mov.u32 %r30, %cluster_ctarank;\nxor.b32 %r31, %r30, 1;\nmov.u32 %r29, %ctaid.x;\nmul.wide.u32 %d2, %r29, 256;\nadd.u64 %d1, %d1, %d2;\n";
    let text = text(&format!("{first}{body}")).replace(") {\n.reg", ") .reqnctapercluster 2 {\n.reg");
    let module = device.load(&text).unwrap_or_else(|e| panic!("{e}"));
    let p = upload(&mut device, &bytes(&(0..256).collect::<Vec<u32>>(), u32::to_le_bytes));
    let launch = Launch { grid: [4, 1, 1], threads: [64, 1, 1], shared: 0 };
    match device.launch(module.kernel("k").expect("it is there"), launch, &p.to_le_bytes()) {
        Ok(_) => Ok(words(&device, p, 256)),
        Err(LaunchError::Fault(f)) => Err(f),
        Err(e) => panic!("{e}"),
    }
}

fn wrong(body: &str) -> Wrong {
    run(body, Options::default()).expect_err("it is wrong").wrong
}

/// Each thread writes its word into the other block's shared memory, and reads what came into its own.
const EXCHANGE: &str = "
    .shared .align 16 .b8 s[256];
    mov.u32 %r1, s;
    shl.b32 %r2, %r0, 2;
    add.u32 %r1, %r1, %r2;
    mapa.shared::cluster.u32 %r3, %r1, %r31;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
    ld.global.u32 %r4, [%d1];
    st.shared::cluster.u32 [%r3], %r4;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.acquire.aligned;
    ld.shared.u32 %r5, [%r1];
    st.global.u32 [%d1], %r5;";

#[test]
fn blocks_of_a_cluster_reach_each_others_shared_memory() {
    for options in all_options() {
        let out = run(EXCHANGE, options).expect("it is right");
        assert_eq!(out, (0..256).map(|i| i ^ 64).collect::<Vec<u32>>(), "{options:?}");
    }
    let unordered = EXCHANGE.replace("barrier.cluster.arrive.aligned", "barrier.cluster.arrive.relaxed.aligned");
    assert!(matches!(wrong(&unordered), Wrong::Race { space: "shared", .. }));
    assert!(wrong(&EXCHANGE.replace("st.shared::cluster", "st.shared")).to_string().contains("is reached by `.shared::cluster`"));
    assert!(wrong(&EXCHANGE.replace("%r1, %r31", "%r1, 2")).to_string().contains("a cluster of 2"));
    assert!(matches!(wrong(&EXCHANGE.replace("st.shared::cluster.u32 [%r3]", "st.shared::cluster.u32 [%r3+256]")), Wrong::OutOfBounds { .. }));
    // Who has not arrived may not wait, and who has arrived waits before it arrives again.
    assert!(wrong("barrier.cluster.wait.aligned;").to_string().contains("has not arrived"));
    assert!(wrong("barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;").to_string().contains("again before"));
}

/// Of another block's memory these instructions know nothing.
#[test]
fn what_is_of_a_block_alone_does_not_reach_another() {
    let mapped = ".shared .align 16 .b8 s[512];\nmov.u32 %r1, s;\nmapa.shared::cluster.u32 %r1, %r1, %r31;\n";
    for alone in [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];",
        "cp.async.ca.shared.global [%r1], [%d0], 16;",
        "mbarrier.init.shared::cta.b64 [%r1], 1;",
        "ld.shared.u32 %r2, [%r1];",
        "setp.ne.u32 %p1, %r0, 0;\n@!%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;",
    ] {
        assert!(wrong(&format!("{mapped}{alone}")).to_string().contains("is reached by `.shared::cluster`"), "{alone}");
    }
}

/// Each block of a cluster multiplies for itself: copies, warpgroups and barriers of the second are its own. Both
/// write the same results to the same place, which is not watched.
#[test]
fn blocks_of_a_cluster_multiply_out_of_their_own_memory() {
    let single = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r15], [%d1, {%r12, %r13}], [%r10];";
    let several = "mov.u32 %r38, %cluster_ctarank;\nshl.b32 %r38, 1, %r38;\n".to_string()
        + &single.replace("bytes [", "bytes.multicast::cluster [").replace("[%r10];", "[%r10], %r38;");
    let alone = hopper();
    let text = alone.replace(".maxntid 160", ".maxntid 160\n.reqnctapercluster 2").replace(single, &several);
    assert!(text.contains("multicast"));
    for options in all_options() {
        let options = Options { global_races: false, ..options };
        let [(want, one), (got, two)] = [(&alone, 1), (&text, 2)].map(|(text, blocks)| run_hopper(text, blocks, options).expect("it is right"));
        assert_eq!(got, want, "{options:?}");
        assert_eq!(two.matrix_operations, 2 * one.matrix_operations);
    }
}

#[test]
fn who_waits_for_a_cluster_in_vain_is_named() {
    let body = "
        setp.eq.u32 %p1, %r30, 0;
        @%p1 bra FIRST;
        bar.sync 0, 96;
    FIRST:
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;";
    let Wrong::Deadlock(who) = wrong(body) else { panic!("warps wait at different barriers") };
    assert_eq!(who.len(), 4);
    assert!(who[0].ends_with("for all warps of its cluster") && who[2].contains("at barrier 0"), "{who:?}");
    // Blocks have barriers of their own, and those that end are not waited for.
    assert!(
        run("bar.sync 0;\nsetp.eq.u32 %p1, %r30, 0;\n@%p1 bra END;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\nEND:", Options::default())
            .is_ok()
    );
}

/// Each block copies half of 256 bytes, its own words and the other's, to both. When both have read them, the same
/// place gets the words once more, turned around.
const SHARED_COPIES: &str = "
    .shared .align 128 .b8 s[256];
    .shared .align 8 .b8 bars[16];
    mov.u32 %r1, s;
    mov.u32 %r2, bars;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.init.shared::cta.b64 [%r2+8], 4;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r10, 0;
    shl.b32 %r11, %r30, 7;
    and.b32 %r12, %r29, 2;
    mul.wide.u32 %d3, %r12, 256;
    add.u64 %d3, %d3, %d0;
    mul.wide.u32 %d4, %r30, 128;
    add.u64 %d3, %d3, %d4;
AGAIN:
    @%p1 bra USE;
    xor.b32 %r13, %r10, 1;
EMPTY:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2+8], %r13;
    @!%p2 bra EMPTY;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    add.u32 %r14, %r1, %r11;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r14], [%d3], 128, [%r2], 3;
    xor.b32 %r11, %r11, 128;
USE:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r10;
    @!%p2 bra USE;
    shl.b32 %r15, %r0, 2;
    add.u32 %r15, %r15, %r1;
    ld.shared.u32 %r16, [%r15];
    bar.warp.sync -1;
    and.b32 %r17, %r0, 31;
    setp.ne.u32 %p3, %r17, 0;
    @%p3 bra DONE;
    mapa.shared::cluster.u32 %r18, %r2, %r30;
    mapa.shared::cluster.u32 %r19, %r2, %r31;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r18+8];
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r19+8];
DONE:
    bar.warp.sync -1;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p4, %r10, 2;
    @%p4 bra AGAIN;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    st.global.u32 [%d1], %r16;";

#[test]
fn a_copy_to_several_blocks_arrives_in_each() {
    // The words of the second round: a cluster's first 32 and the 32 of 128 bytes later, the other way around.
    let of_block = |b: u32| (0..64).map(move |i| b / 2 * 128 + (i ^ 32));
    let expected: Vec<u32> = (0..4).flat_map(of_block).collect();
    for options in all_options() {
        assert_eq!(run(SHARED_COPIES, options).expect("it is right"), expected, "{options:?}");
    }
}

#[test]
fn each_wait_and_arrival_of_a_cluster_is_needed() {
    let found = |from: &str, to: &str| {
        let body = SHARED_COPIES.replace(from, to);
        assert_ne!(body, SHARED_COPIES, "{from}");
        all_options().into_iter().find_map(|options| run(&body, options).err()).unwrap_or_else(|| panic!("nothing is wrong without `{from}`")).wrong
    };
    let barrier = "READY:\n    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;";
    assert!(matches!(found(barrier, "READY:\n    bar.sync 0;"), Wrong::Barrier { .. }));
    assert!(matches!(found("    fence.mbarrier_init.release.cluster;\n", ""), Wrong::Barrier { .. }));
    // Without its scope, a wait does not hear of what the other block has read.
    assert!(matches!(found("try_wait.parity.acquire.cluster", "try_wait.parity"), Wrong::Race { .. }));
    assert!(
        found("arrive.release.cluster.shared::cluster.b64 _, [%r19", "arrive.shared::cluster.b64 _, [%r19")
            .to_string()
            .contains("`.release.cluster`")
    );
    assert!(matches!(found("[%r2+8], 4", "[%r2+8], 2"), Wrong::Race { .. }));
    let alone = found("    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r19+8];\n", "");
    assert!(matches!(alone, Wrong::Deadlock(_)), "{alone}");
    let end = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n    st.global";
    assert!(found(end, "    st.global").to_string().contains("has ended"));
    assert!(found("[%r2], 3;", "[%r2], 4;").to_string().contains("which is of the cluster"));
}

#[test]
fn grids_are_multiples_of_clusters() {
    let mut device = Device::default();
    let clustered = |n: &str| text("").replace(") {\n.reg", &format!(") .reqnctapercluster {n} {{\n.reg"));
    let module = device.load(&clustered("2")).expect("it is PTX");
    let launch = Launch { grid: [3, 1, 1], threads: [32, 1, 1], shared: 0 };
    let refused = device.launch(module.kernel("k").expect("it is there"), launch, &[0; 8]).expect_err("3 is odd");
    assert!(refused.to_string().contains("3 blocks along x are no multiple of 2"), "{refused}");
    assert!(device.load(&clustered("1, 2")).expect_err("along y").message.contains("along x, not 1 x 2 x 1"));
    assert!(device.load(&clustered("16")).is_err());
}
