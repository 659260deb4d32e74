//! Worlds: ranks that another launcher has started as processes of one machine or several, as its environment says.

use std::fmt;

/// One process's place in a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// What started the process.
    pub launcher: Launcher,
    /// The process's number in the world, from 0.
    pub rank: u64,
    /// Ranks of the world.
    pub size: u64,
    /// What tells apart machines that look alike: the launcher's number of this one.
    pub node: Option<u64>,
    /// Where rank 0 listens.
    pub meeting: RendezvousEndpoint,
}

/// A host that all ranks reach, by name or number, and a port of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousEndpoint {
    /// Name or address of the host.
    pub host: String,
    /// The TCP port at which rank 0 listens; never 0.
    pub port: u16,
}

/// A program that starts the ranks of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// PyTorch's `torchrun`.
    Torchrun,
    /// Open MPI's.
    Mpirun,
    /// MPICH's and its kin's.
    Mpiexec,
    /// Slurm's `srun`.
    Srun,
}

/// Where the ranks of a world are, as far as its launcher says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Machines {
    /// All on this one, so that they meet at a loopback address.
    One,
    Some,
}

/// The variables of a launcher.
struct LauncherVariables {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// Empty if the launcher does not count machines.
    node: &'static str,
    /// Without this one it was not that launcher.
    mark: &'static str,
}

impl Launcher {
    /// In the order in which they count: the others may themselves be started by srun.
    const ALL: [Launcher; 4] = [Launcher::Torchrun, Launcher::Mpirun, Launcher::Mpiexec, Launcher::Srun];

    fn names(self) -> LauncherVariables {
        match self {
            Launcher::Torchrun => LauncherVariables {
                rank: "RANK",
                size: "WORLD_SIZE",
                local_rank: "LOCAL_RANK",
                local_size: "LOCAL_WORLD_SIZE",
                node: "GROUP_RANK",
                mark: "WORLD_SIZE",
            },
            Launcher::Mpirun => LauncherVariables {
                rank: "OMPI_COMM_WORLD_RANK",
                size: "OMPI_COMM_WORLD_SIZE",
                local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
                local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
                node: "",
                mark: "OMPI_COMM_WORLD_SIZE",
            },
            Launcher::Mpiexec => LauncherVariables {
                rank: "PMI_RANK",
                size: "PMI_SIZE",
                local_rank: "MPI_LOCALRANKID",
                local_size: "MPI_LOCALNRANKS",
                node: "",
                mark: "PMI_SIZE",
            },
            // A batch script has SLURM_PROCID and SLURM_NTASKS too, but no step.
            Launcher::Srun => LauncherVariables {
                rank: "SLURM_PROCID",
                size: "SLURM_STEP_NUM_TASKS",
                local_rank: "SLURM_LOCALID",
                local_size: "SLURM_STEP_TASKS_PER_NODE",
                node: "SLURM_NODEID",
                mark: "SLURM_STEP_ID",
            },
        }
    }

    /// How a world of another size is started.
    fn starts(self, ranks: u64) -> String {
        match self {
            Launcher::Torchrun => format!("torchrun --no-python --nnodes N --nproc-per-node R with N x R = {ranks}"),
            Launcher::Mpirun | Launcher::Mpiexec => format!("{self} -n {ranks}"),
            Launcher::Srun => format!("srun --ntasks {ranks}"),
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::Mpirun => "mpirun",
            Launcher::Mpiexec => "mpiexec",
            Launcher::Srun => "srun",
        })
    }
}

/// Why this process cannot take its place in a world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum WorldError {
    #[error("`{name}`, which {launcher} sets, is `{value}`, not {wanted}")]
    Value { launcher: Launcher, name: &'static str, value: String, wanted: &'static str },
    #[error("`{name}` is {value}, but `{of}` is {count}: ranks count from 0")]
    Range { name: &'static str, value: u64, of: &'static str, count: u64 },
    #[error(
        "{launcher} started this rank, but `{name}` is not set; --rendezvous HOST:PORT says instead where ranks meet: rank 0's machine and a free port of it"
    )]
    Missing { launcher: Launcher, name: &'static str },
    #[error("`{0}` is not HOST:PORT")]
    Meeting(String),
    #[error("`SLURM_STEP_NODELIST` is `{0}`, which is no list of hosts")]
    Hosts(String),
    #[error(
        "{launcher} started {found} ranks, but the artifact is for {expected}: start that many ({way}), compile for {found} ranks, or \
         start `mcc run` once without {launcher}, which starts all ranks on this machine"
    )]
    Size { launcher: Launcher, found: u64, expected: u64, way: String },
}

impl World {
    /// The world that this process was started into, if any, for an artifact of so many ranks; `variable` looks up
    /// the environment, `meeting` (`HOST:PORT`) says where ranks meet if the launcher is not to. A world of one rank
    /// is none: `mcc run` then starts what ranks it needs itself.
    ///
    /// # Errors
    /// If the environment contradicts itself or lacks something, or the world has not the ranks that are needed.
    pub fn find(ranks: u64, variable: impl Fn(&str) -> Option<String>, meeting: Option<&str>) -> Result<Option<World>, WorldError> {
        let get = |name: &str| variable(name).filter(|v| !v.is_empty());
        for launcher in Launcher::ALL {
            let names = launcher.names();
            let number = |name: &'static str| get(name).map(|v| numeral(launcher, name, v)).transpose();
            if get(names.mark).is_none() {
                continue;
            }
            let (Some(rank), Some(size)) = (number(names.rank)?, number(names.size)?) else { continue };
            below(names.rank, rank, names.size, size)?;
            if size == 1 {
                return Ok(None);
            }
            Self::check(launcher, size, ranks)?;
            let local = number(names.local_rank)?;
            // Slurm gives a count of tasks for each node, as in `4(x2),3`.
            if let (Some(local), true) = (local, launcher != Launcher::Srun)
                && let Some(count) = number(names.local_size)?
            {
                below(names.local_rank, local, names.local_size, count)?;
            }
            let node = number(names.node)?;
            let machines = match launcher {
                Launcher::Srun if number("SLURM_STEP_NUM_NODES")? == Some(1) => Machines::One,
                Launcher::Srun => Machines::Some,
                Launcher::Torchrun | Launcher::Mpirun | Launcher::Mpiexec if number(names.local_size)? == Some(size) => Machines::One,
                Launcher::Torchrun | Launcher::Mpirun | Launcher::Mpiexec => Machines::Some,
            };
            let meeting = match meeting {
                Some(given) => RendezvousEndpoint::parse(given)?,
                None => RendezvousEndpoint::of(launcher, machines, &get)?,
            };
            return Ok(Some(World { launcher, rank, size, node, meeting }));
        }
        Ok(None)
    }

    fn check(launcher: Launcher, found: u64, expected: u64) -> Result<(), WorldError> {
        let way = launcher.starts(expected);
        if found == expected { Ok(()) } else { Err(WorldError::Size { launcher, found, expected, way }) }
    }

    /// Whether the world has so many ranks.
    ///
    /// # Errors
    /// If not, with what to do.
    pub fn has(&self, ranks: u64) -> Result<(), WorldError> {
        World::check(self.launcher, self.size, ranks)
    }
}

impl RendezvousEndpoint {
    /// `HOST:PORT`, `[ADDRESS]:PORT`.
    ///
    /// # Errors
    /// If it is not written so.
    pub fn parse(text: &str) -> Result<RendezvousEndpoint, WorldError> {
        let wrong = || WorldError::Meeting(text.into());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = port.parse().ok().filter(|p| *p > 0).ok_or_else(wrong)?;
        if host.is_empty() { Err(wrong()) } else { Ok(RendezvousEndpoint { host: host.into(), port }) }
    }

    fn of(launcher: Launcher, machines: Machines, get: &impl Fn(&str) -> Option<String>) -> Result<RendezvousEndpoint, WorldError> {
        let port = get("MASTER_PORT").map(|v| port(launcher, v)).transpose()?;
        // Within a job of Slurm its first machine has rank 0. A step may have fewer machines than its job.
        let lists: &[&str] = if launcher == Launcher::Srun { &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] } else { &["SLURM_JOB_NODELIST"] };
        let (host, port) = match get("SLURM_JOB_ID").and_then(|v| v.parse::<u64>().ok()) {
            Some(job) if launcher != Launcher::Torchrun => {
                let first = lists.iter().find_map(|name| get(name)).map(first_host).transpose()?;
                let step = get("SLURM_STEP_ID").and_then(|v| v.parse::<u64>().ok()).filter(|_| launcher == Launcher::Srun).unwrap_or(0);
                // Jobs and steps that share a machine have ports of their own.
                (get("MASTER_ADDR").or(first), port.or(Some(20_000 + ((job + step) % 10_000) as u16)))
            }
            Some(_) | None => (get("MASTER_ADDR"), port),
        };
        // torchrun itself listens at the port that it names, and says so.
        let taken = launcher == Launcher::Torchrun && get("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let missing = |name| WorldError::Missing { launcher, name };
        let (host, port) = match machines {
            Machines::One => (Some("127.0.0.1".to_owned()), port.or_else(|| Some(port_here(get("PMIX_NAMESPACE"))))),
            Machines::Some => (host, port),
        };
        let port = port.ok_or(missing("MASTER_PORT"))?;
        let free = if taken { port.checked_add(1).unwrap_or(port - 1) } else { port };
        Ok(RendezvousEndpoint { host: host.ok_or(missing("MASTER_ADDR"))?, port: free })
    }
}

/// A port for ranks of one machine whose launcher names none: made of the job's name where there is one, else of the
/// launcher's process, whose children they all are.
fn port_here(job: Option<String>) -> u16 {
    let parent = || rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get()).to_string();
    let hash = blake3::hash(job.unwrap_or_else(parent).as_bytes());
    20_000 + u16::from_le_bytes([hash.as_bytes()[0], hash.as_bytes()[1]]) % 10_000
}

fn numeral(launcher: Launcher, name: &'static str, value: String) -> Result<u64, WorldError> {
    value.trim().parse().map_err(|_| WorldError::Value { launcher, name, value, wanted: "a number" })
}

fn port(launcher: Launcher, value: String) -> Result<u16, WorldError> {
    let wanted = "a port (1 to 65535)";
    value.trim().parse().ok().filter(|p| *p > 0).ok_or(WorldError::Value { launcher, name: "MASTER_PORT", value, wanted })
}

fn below(name: &'static str, value: u64, of: &'static str, count: u64) -> Result<(), WorldError> {
    if value < count { Ok(()) } else { Err(WorldError::Range { name, value, of, count }) }
}

/// The first of Slurm's list of hosts: `a` of `a,b`, `node01` of `node[01-04,7]`, `r1n3` of `r[1-2]n[3,4]-x`'s likes.
fn first_host(list: String) -> Result<String, WorldError> {
    let mut host = String::new();
    let mut rest = list.as_str();
    let end = |text: &str| text.find([',', '[', ']']).unwrap_or(text.len());
    loop {
        let plain = end(rest);
        host += &rest[..plain];
        rest = &rest[plain..];
        match rest.strip_prefix('[').map(|inner| inner.split_once(']')) {
            // This is the first number of the first range, with its leading zeros.
            Some(Some((ranges, after))) => {
                let number = ranges.split([',', '-']).next().unwrap_or_default();
                if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(WorldError::Hosts(list));
                }
                host += number;
                rest = after;
            }
            Some(None) => return Err(WorldError::Hosts(list)),
            None if rest.starts_with(']') || host.is_empty() => return Err(WorldError::Hosts(list)),
            None => return Ok(host),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(environment: &str) -> Result<Option<World>, String> {
        let pairs: Vec<(&str, &str)> = environment.split(' ').filter_map(|p| p.split_once('=')).collect();
        let ranks = pairs
            .iter()
            .find(|p| ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"].contains(&p.0))
            .and_then(|p| p.1.parse().ok());
        let ranks = ranks.unwrap_or(8);
        let variable = |name: &str| pairs.iter().find(|p| p.0 == name).map(|p| p.1.to_owned());
        World::find(ranks, variable, None).map_err(|e| e.to_string())
    }

    fn meets(environment: &str) -> String {
        let world = found(environment).unwrap().unwrap();
        format!("{} {}/{} {:?} {}:{}", world.launcher, world.rank, world.size, world.node, world.meeting.host, world.meeting.port)
    }

    const TORCHRUN: &str = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=a MASTER_PORT=29500";
    const SRUN: &str = "SLURM_JOB_ID=70123 SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=0 \
                        SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=node[01-04,7] SLURM_JOB_NODELIST=node[01-09]";

    #[test]
    fn worlds_of_torchrun_mpirun_and_srun_are_found() {
        assert_eq!(meets(TORCHRUN), "torchrun 3/4 Some(1) a:29500");
        assert_eq!(meets(&format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True")), "torchrun 3/4 Some(1) a:29501");
        assert_eq!(meets(SRUN), "srun 1/8 Some(0) node01:20125");
        assert_eq!(meets(&format!("{SRUN} MASTER_ADDR=b MASTER_PORT=7")), "srun 1/8 Some(0) b:7");
        // Here srun has started torchrun.
        assert_eq!(meets(&format!("{TORCHRUN} {SRUN}")), "torchrun 3/4 Some(1) a:29500");
        assert_eq!(meets(&format!("PMI_RANK=1 PMI_SIZE=8 {SRUN}")), "mpiexec 1/8 None node01:20123");
        assert_eq!(meets("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=5"), "mpirun 0/2 None ::1:5");
    }

    #[test]
    fn ranks_of_one_machine_meet_at_a_loopback_address() {
        let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 MASTER_ADDR=a MASTER_PORT=29500";
        assert_eq!(meets(torchrun), "torchrun 3/4 Some(0) 127.0.0.1:29500");
        assert_eq!(meets(&format!("{SRUN} SLURM_STEP_NUM_NODES=1")), "srun 1/8 Some(0) 127.0.0.1:20125");
        assert_eq!(meets(&format!("{SRUN} SLURM_STEP_NUM_NODES=2")), "srun 1/8 Some(0) node01:20125");
        // Only the launcher itself tells runs apart.
        let mpirun = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        let ports = [mpirun.to_owned(), format!("{mpirun} PMIX_NAMESPACE=a"), format!("{mpirun} PMIX_NAMESPACE=b")].map(|environment| {
            let meeting = found(&environment).unwrap().unwrap().meeting;
            assert_eq!(meeting.host, "127.0.0.1");
            assert_eq!(found(&environment).unwrap().unwrap().meeting, meeting);
            meeting.port
        });
        assert!(ports.iter().all(|p| (20_000..30_000).contains(p)) && ports[1] != ports[2], "{ports:?}");
        assert!(found("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1").is_err());
    }

    #[test]
    fn one_rank_alone_and_a_batch_script_are_no_world() {
        for environment in ["", "RANK=0 WORLD_SIZE=1", "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=a[1-2]", "RANK=7"] {
            assert_eq!(found(environment), Ok(None), "{environment}");
        }
    }

    #[test]
    fn an_environment_that_contradicts_itself_is_refused() {
        let cases = [
            ("RANK=4 WORLD_SIZE=4", "`RANK` is 4, but `WORLD_SIZE` is 4: ranks count from 0"),
            ("RANK=x WORLD_SIZE=4", "`RANK`, which torchrun sets, is `x`, not a number"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "`LOCAL_RANK` is 2, but `LOCAL_WORLD_SIZE` is 2"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", "`MASTER_PORT`, which torchrun sets, is `http`, not a port"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "is `70000`, not a port"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "`MASTER_PORT` is not set; --rendezvous HOST:PORT"),
            ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 MASTER_PORT=4", "mpirun started this rank, but `MASTER_ADDR` is not set"),
            ("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=a[1", "`a[1`, which is no list of hosts"),
        ];
        for (environment, says) in cases {
            let error = found(environment).unwrap_err();
            assert!(error.contains(says), "{environment}: {error}");
        }
    }

    #[test]
    fn a_world_of_another_size_is_refused_before_all_else() {
        let variable = |name: &str| ["RANK", "WORLD_SIZE"].contains(&name).then(|| if name == "RANK" { "0" } else { "3" }.to_owned());
        let error = World::find(2, variable, None).unwrap_err().to_string();
        assert!(error.starts_with("torchrun started 3 ranks, but the artifact is for 2: start that many (torchrun --no-python"), "{error}");
    }

    #[test]
    fn the_first_host_of_a_list() {
        let first = |list: &str| first_host(list.into()).ok();
        for (list, host) in [("a", "a"), ("a1,b[2-3]", "a1"), ("node[01-04,7]", "node01"), ("n[7,9]-ib", "n7-ib"), ("r[1-2]n[03,4]", "r1n03")] {
            assert_eq!(first(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", "a[", "a]", "a[x]", "a[]", ",a"] {
            assert_eq!(first(list), None, "{list}");
        }
    }

    #[test]
    fn a_meeting_can_be_given() {
        let parse = |text: &str| RendezvousEndpoint::parse(text).ok().map(|m| (m.host, m.port));
        assert_eq!(parse("head:29500"), Some(("head".into(), 29500)));
        assert_eq!(parse("[::1]:80"), Some(("::1".into(), 80)));
        for text in ["head", "head:", ":80", "head:0", "head:x"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
