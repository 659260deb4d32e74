//! The table of inline assembly: every instruction that kernels use and LLVM has no operation for, with its operands.
//!
//! Names and operands are those of the PTX ISA 8.0: `cp.async`, `ldmatrix`, `mma.sync`, `wgmma` and its
//! synchronisation, `fence.proxy`, `mbarrier`, `cp.async.bulk.tensor`, `setmaxnreg`.

use std::fmt::Write;

/// A 16-bit float that tensor cores multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// 8 bits of exponent and 7 of fraction: the upper half of an f32.
    Bf16,
    /// 5 bits of exponent and 10 of fraction (IEEE 754).
    F16,
}

impl Half {
    fn name(self) -> &'static str {
        match self {
            Half::Bf16 => "bf16",
            Half::F16 => "f16",
        }
    }
}

/// What tensor cores multiply, to sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factor {
    /// bf16 or f16, two of them in a register.
    Half(Half),
    /// f32, of which the last 13 bits do not count.
    Tf32,
}

impl From<Half> for Factor {
    fn from(half: Half) -> Factor {
        Factor::Half(half)
    }
}

impl Factor {
    fn name(self) -> &'static str {
        match self {
            Factor::Half(half) => half.name(),
            Factor::Tf32 => "tf32",
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> i64 {
        match self {
            Factor::Half(_) => 2,
            Factor::Tf32 => 4,
        }
    }

    /// Contracted elements of an instruction: 32 bytes of them.
    pub fn depth(self) -> i64 {
        32 / self.bytes()
    }
}

/// An instruction. Addresses of shared memory are 32-bit numbers, those of global memory 64-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// `(to in shared, from in global)`: copies so many bytes in the background; both are aligned to them.
    CopyAsync {
        /// Bytes of a copy: 4, 8 or 16.
        bytes: u32,
    },
    /// `(to, from, bytes)`: the same, but only the first bytes are read; what follows them becomes zero.
    CopyAsyncFilled {
        /// Bytes that a copy writes to shared memory: 4, 8 or 16.
        bytes: u32,
    },
    /// Closes a group of the copies since the last one.
    CommitCopies,
    /// Waits until all but the last so many groups are there, as far as this thread began them.
    WaitCopies {
        /// Groups of copies, the last ones, that may still be under way.
        left: u32,
    },
    /// `(row in shared)`: four 8 x 8 matrices of 16-bit numbers, the rows' addresses from lanes 0-7, 8-15, .., or, of
    /// their transposes, the columns'.
    LoadMatrices {
        /// Whether each matrix arrives as its transpose.
        transposed: bool,
    },
    /// `(4 words of A, 2 words of B, 4 sums)`: 16 x 8 sums of 16 products each, 8 of tf32, to four sums.
    Multiply(Factor),
    /// Not an instruction: at the start of a loop, asks the assembler to leave it rolled.
    LeaveRolled,
    /// What this thread wrote to shared memory, by copies that it waited for too, may be read by the matrix engine.
    FenceProxy,
    /// Sums in registers are the matrix engine's from here on.
    GroupFence,
    /// `(f32)`: the same, with sums that must have been made before.
    FenceSums {
        /// Sums of a thread, in a register each.
        count: usize,
    },
    /// `(descriptor of A, descriptor of B, columns / 2 sums)`: a warpgroup's 64 rows of so many columns of sums of 16
    /// products each, 8 of tf32, to the sums, in the background. Transposed: of the factor whose contracted elements
    /// are apart, which those of tf32 never are.
    GroupMultiply {
        /// What elements of both factors are.
        factor: Factor,
        /// Columns of B and of the sums: a multiple of 8, at most 256.
        columns: u32,
        /// Whether A, and whether B, is transposed.
        transposed: [bool; 2],
    },
    /// `(descriptor of A, descriptor of B)`: such products, of which neither factor is transposed, as sums that begin
    /// with them.
    GroupProduct {
        /// What elements of both factors are.
        half: Half,
        /// Columns of B and of the sums: a multiple of 8, at most 256.
        columns: u32,
    },
    /// `(4 words of A, descriptor of B, columns / 2 sums)`: as `GroupMultiply`, with A in registers: a warp's 16 rows
    /// as `Multiply` has them. Transposed: B.
    GroupMultiplyWords {
        /// What elements of both factors are.
        half: Half,
        /// Columns of B and of the sums: a multiple of 8, at most 256.
        columns: u32,
        /// Whether B is transposed.
        transposed: bool,
    },
    /// Closes a group of the products since the last one.
    CommitProducts,
    /// Waits until all but the last so many groups of products are done.
    WaitProducts {
        /// Groups of products, the last ones, that may still be under way.
        left: u32,
    },
    /// `(f32)`: the same, with what must not be used or made before: sums that are waited for, among others.
    WaitSums {
        /// Groups of products, the last ones, that may still be under way.
        left: u32,
        /// Values of a thread that pass through, in a register each.
        count: usize,
    },
    /// `(mbarrier in shared)`: its phases end with so many arrivals, and all bytes that are expected.
    BarrierInit {
        /// Arrivals that each phase waits for.
        arrivals: u32,
    },
    /// The mbarriers that this thread initialised may be used by copies, of the threads that it meets hereafter.
    FenceBarriers,
    /// `(mbarrier)`: arrives; what this thread did before is done for those who see the phase end.
    Arrive,
    /// `(mbarrier, bytes)`: arrives, and expects so many bytes of copies in this phase.
    ArriveExpecting,
    /// `(mbarrier, parity)`: 1 if a phase of that parity has ended, the last one or that before the first; 0 maybe
    /// after having waited for a while.
    TryWait {
        /// Whether it hears of what those did before that arrived from other blocks of the cluster.
        of_cluster: bool,
    },
    /// `(to in shared, tensor map, as many coordinates as dims, mbarrier)`: copies a box in the background and
    /// completes its bytes at the mbarrier. One thread does it. The map's address is generic; coordinates count from
    /// the innermost.
    CopyBox {
        /// Dims of the tensor map, 1 to 5.
        dims: u32,
        /// Blocks of the cluster that get a copy each, at the same offsets of their shared memory; 1 for this one.
        blocks: u32,
    },
    /// The number of the block in its cluster.
    Rank,
    /// `(address in shared, rank)`: the address of the same place in that block of the cluster.
    MapRank,
    /// `(mbarrier by `MapRank`)`: arrives there; what this thread did before is done for those who see the phase end.
    ArriveAt,
    /// `(address by `MapRank`, word)`: writes it there.
    StoreAt,
    /// Waits until all threads of the cluster have come here, and makes what they did visible to each other.
    MeetCluster,
    /// 1 in one lane of the warp, 0 in all others.
    Elect,
    /// The number of blocks of the launch. Unlike LLVM's operation it stays where it is.
    Blocks,
    /// `(address in global, last)`: a number there counts up, from the last one to 0; what it was before.
    CountAround,
    /// From here on the threads of the warpgroup have so many registers, more than before.
    MoreRegisters(u32),
    /// Likewise, fewer.
    FewerRegisters(u32),
}

/// What an instruction gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Results {
    /// No register.
    Nothing,
    /// A 32-bit number.
    Word,
    /// 32-bit numbers, several.
    Words(usize),
    /// f32, several.
    Floats(usize),
}

/// How an instruction is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AsmText {
    /// PTX, in which `$0`, `$1`, .. stand for operands, results first.
    pub template: String,
    /// LLVM's constraints of the operands, results first, then of what is clobbered.
    pub constraints: String,
    /// The registers that it writes.
    pub results: Results,
}

/// `$from, $from+1, ..`, in braces.
fn list(from: usize, count: usize) -> String {
    let names: Vec<String> = (from..from + count).map(|k| format!("${k}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Constraints: of each kind so many, in order.
fn constraints(parts: &[(&str, usize)], memory: bool) -> String {
    let mut out = String::new();
    for (kind, count) in parts {
        for _ in 0..*count {
            write!(out, "{}{kind}", if out.is_empty() { "" } else { "," }).expect("invariant: strings can be written to");
        }
    }
    if memory {
        write!(out, "{}~{{memory}}", if out.is_empty() { "" } else { "," }).expect("invariant: strings can be written to");
    }
    out
}

/// Operands that are the same registers as the first results.
fn tied(count: usize) -> String {
    (0..count).map(|k| format!(",{k}")).collect()
}

impl Instruction {
    /// Its PTX, and the constraints of its operands.
    pub fn text(self) -> AsmText {
        let nothing =
            |template: String, parts: &[(&str, usize)]| AsmText { template, constraints: constraints(parts, true), results: Results::Nothing };
        let through = |template: String, count: usize| AsmText {
            template,
            constraints: constraints(&[("=f", count)], false) + &tied(count) + ",~{memory}",
            results: Results::Floats(count),
        };
        // Only copies of 16 bytes can bypass the L1 cache.
        let cache = |bytes| if bytes == 16 { "cg" } else { "ca" };
        match self {
            Instruction::CopyAsync { bytes } => {
                nothing(format!("cp.async.{}.shared.global [$0], [$1], {bytes};", cache(bytes)), &[("r", 1), ("l", 1)])
            }
            Instruction::CopyAsyncFilled { bytes } => {
                nothing(format!("cp.async.{}.shared.global [$0], [$1], {bytes}, $2;", cache(bytes)), &[("r", 1), ("l", 1), ("r", 1)])
            }
            Instruction::LeaveRolled => nothing(".pragma \"nounroll\";".into(), &[]),
            Instruction::CommitCopies => nothing("cp.async.commit_group;".into(), &[]),
            Instruction::WaitCopies { left } => nothing(format!("cp.async.wait_group {left};"), &[]),
            Instruction::LoadMatrices { transposed } => AsmText {
                template: format!("ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {}, [$4];", if transposed { ".trans" } else { "" }, list(0, 4)),
                constraints: constraints(&[("=r", 4), ("r", 1)], true),
                results: Results::Words(4),
            },
            Instruction::FenceProxy => nothing("fence.proxy.async.shared::cta;".into(), &[]),
            Instruction::GroupFence => nothing("wgmma.fence.sync.aligned;".into(), &[]),
            Instruction::CommitProducts => nothing("wgmma.commit_group.sync.aligned;".into(), &[]),
            Instruction::WaitProducts { left } => nothing(format!("wgmma.wait_group.sync.aligned {left};"), &[]),
            Instruction::GroupMultiply { factor, columns, transposed: [a, b] } => {
                let (name, depth, count) = (factor.name(), factor.depth(), columns as usize / 2);
                let transposed = match factor {
                    Factor::Half(_) => format!(", {}, {}", u8::from(a), u8::from(b)),
                    Factor::Tf32 => String::new(),
                };
                AsmText {
                    template: format!(
                        "{{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{name}.{name} {}, ${count}, ${}, p, 1, 1{transposed}; }}",
                        list(0, count),
                        count + 1,
                    ),
                    constraints: constraints(&[("=f", count), ("l", 2)], false) + &tied(count) + ",~{memory}",
                    results: Results::Floats(count),
                }
            }
            Instruction::GroupProduct { half, columns } => {
                let (half, count) = (half.name(), columns as usize / 2);
                AsmText {
                    template: format!(
                        "{{ .reg .pred p; setp.ne.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} {}, ${count}, ${}, p, 1, 1, 0, 0; }}",
                        list(0, count),
                        count + 1
                    ),
                    constraints: constraints(&[("=f", count), ("l", 2)], true),
                    results: Results::Floats(count),
                }
            }
            Instruction::GroupMultiplyWords { half, columns, transposed } => {
                let (half, count) = (half.name(), columns as usize / 2);
                AsmText {
                    template: format!(
                        "{{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} {}, {}, ${}, p, 1, 1, {}; }}",
                        list(0, count),
                        list(count, 4),
                        count + 4,
                        u8::from(transposed)
                    ),
                    constraints: constraints(&[("=f", count), ("r", 4), ("l", 1)], false) + &tied(count) + ",~{memory}",
                    results: Results::Floats(count),
                }
            }
            Instruction::FenceSums { count } => through("wgmma.fence.sync.aligned;".into(), count),
            Instruction::WaitSums { left, count } => through(format!("wgmma.wait_group.sync.aligned {left};"), count),
            Instruction::BarrierInit { arrivals } => nothing(format!("mbarrier.init.shared::cta.b64 [$0], {arrivals};"), &[("r", 1)]),
            Instruction::FenceBarriers => nothing("fence.mbarrier_init.release.cluster;".into(), &[]),
            Instruction::Arrive => nothing("mbarrier.arrive.shared::cta.b64 _, [$0];".into(), &[("r", 1)]),
            Instruction::ArriveExpecting => nothing("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;".into(), &[("r", 2)]),
            Instruction::TryWait { of_cluster } => AsmText {
                template: format!(
                    "{{ .reg .pred p; mbarrier.try_wait.parity{}.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }}",
                    if of_cluster { ".acquire.cluster" } else { "" }
                ),
                constraints: constraints(&[("=r", 1), ("r", 2)], true),
                results: Results::Word,
            },
            Instruction::CopyBox { dims, blocks } => {
                let dims = dims as usize;
                let (at, barrier) = (list(2, dims), dims + 2);
                let copy = format!("cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes");
                let operands = format!("[$0], [$1, {at}], [${barrier}]");
                let template = match blocks {
                    1 => format!("{copy} {operands};"),
                    _ => format!("{{ .reg .b16 all; mov.b16 all, {}; {copy}.multicast::cluster {operands}, all; }}", (1 << blocks) - 1),
                };
                nothing(template, &[("r", 1), ("l", 1), ("r", dims + 1)])
            }
            Instruction::Rank => {
                AsmText { template: "mov.u32 $0, %cluster_ctarank;".into(), constraints: constraints(&[("=r", 1)], false), results: Results::Word }
            }
            Instruction::MapRank => AsmText {
                template: "mapa.shared::cluster.u32 $0, $1, $2;".into(),
                constraints: constraints(&[("=r", 1), ("r", 2)], false),
                results: Results::Word,
            },
            Instruction::ArriveAt => nothing("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];".into(), &[("r", 1)]),
            Instruction::StoreAt => nothing("st.shared::cluster.u32 [$0], $1;".into(), &[("r", 2)]),
            Instruction::MeetCluster => nothing("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;".into(), &[]),
            Instruction::Elect => AsmText {
                template: "{ .reg .pred p; elect.sync _|p, -1; selp.u32 $0, 1, 0, p; }".into(),
                constraints: constraints(&[("=r", 1)], true),
                results: Results::Word,
            },
            Instruction::Blocks => {
                AsmText { template: "mov.u32 $0, %nctaid.x;".into(), constraints: constraints(&[("=r", 1)], true), results: Results::Word }
            }
            Instruction::CountAround => AsmText {
                template: "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;".into(),
                constraints: constraints(&[("=r", 1), ("l", 1), ("r", 1)], true),
                results: Results::Word,
            },
            Instruction::MoreRegisters(count) => nothing(format!("setmaxnreg.inc.sync.aligned.u32 {count};"), &[]),
            Instruction::FewerRegisters(count) => nothing(format!("setmaxnreg.dec.sync.aligned.u32 {count};"), &[]),
            Instruction::Multiply(factor) => {
                let (name, depth) = (factor.name(), factor.depth());
                AsmText {
                    template: format!(
                        "mma.sync.aligned.m16n8k{depth}.row.col.f32.{name}.{name}.f32 {}, {}, {}, {};",
                        list(0, 4),
                        list(4, 4),
                        list(8, 2),
                        list(10, 4)
                    ),
                    constraints: constraints(&[("=f", 4), ("r", 6), ("f", 4)], false),
                    results: Results::Floats(4),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_numbered_results_first() {
        let text = Instruction::Multiply(Half::Bf16.into()).text();
        assert_eq!(
            text.template,
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        );
        assert_eq!(text.constraints, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f");
        let text = Instruction::Multiply(Factor::Tf32).text();
        assert_eq!(
            text.template,
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        );
        let text = Instruction::GroupMultiply { factor: Factor::Tf32, columns: 8, transposed: [false; 2] }.text();
        assert_eq!(
            text.template,
            "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {$0, $1, $2, $3}, $4, $5, p, 1, 1; }"
        );
        assert_eq!(Instruction::WaitCopies { left: 2 }.text().constraints, "~{memory}");
    }
}
