//! Worlds that strangers attack. `HOSTILE` is how many connections they make (by default few); with it, the figures
//! are printed, and the delay of the start is judged.

use super::{port, world};
use crate::bench::{Bench, run};
use crate::fixture::{self, Split};
use crate::hostile::{Attack, Attacker};
use runtime::artifact::{self, AcceptedArtifacts};
use runtime::launch::RunOptions;
use runtime::protocol::RankPlacement;
use runtime::rendezvous::{Member, Purpose, StarLinks, Trust, meet};
use runtime::world::{Launcher, RendezvousEndpoint, World};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SPLIT: Split = Split { microbatches: 2, pp: 2, dp: 2, tp: 1 };
const RANKS: u64 = 4;

fn secret() -> Trust {
    Trust::secret("test", b"a secret of a test").unwrap()
}

/// Set for processes that are one rank each: the directory, the rank, the port of the meeting.
const JOINER: &str = "MCC_TEST_BESIEGED";

/// What such a process does. Rank 0's says when the first step is done, waits for a line at the last, and says all
/// losses.
fn joiner(text: &str) {
    let [dir, rank, port] = text.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let bench = Bench::at(dir.into());
    let meeting = RendezvousEndpoint { host: "127.0.0.1".into(), port: port.parse().unwrap() };
    let rank = rank.parse().unwrap();
    let world = World { launcher: Launcher::Torchrun, rank, size: RANKS, node: Some(rank), meeting };
    // Rank 0's process says nothing while it waits, so it needs much patience.
    let options = RunOptions { world: Some(world), trust: secret(), patience: Duration::from_secs(60), ..bench.options() };
    let mut losses = vec![];
    let ran = run(&bench.artifact, &options, &mut |p| {
        losses.push(format!("{:?} {:?}", p.loss, p.grad_norm));
        if p.step == 1 {
            println!("began");
        }
        if p.step == p.steps {
            println!("done");
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
    });
    println!("[{}]", ran.map_or_else(|e| e.to_string(), |_| losses.join(",")));
}

fn start(bench: &Bench, rank: u64, port: u16) -> Child {
    let text = format!("{} {rank} {port}", bench.dir.path().display());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "worlds::besieged::losses_under_siege_are_those_of_an_undisturbed_run", "--nocapture"]);
    command.env(JOINER, text).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn until(out: &mut BufReader<ChildStdout>, what: &str) {
    let mut line = String::new();
    while !line.contains(what) {
        assert!(out.read_line(&mut line).unwrap() > 0, "{line}");
    }
}

fn descriptors(process: u32) -> Vec<String> {
    let list = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
    list.filter_map(|e| Some(fs::read_link(e.ok()?.path()).ok()?.display().to_string())).collect()
}

/// Where a process listens (proc_pid_net_tcp(5)).
fn listens(process: u32) -> Vec<SocketAddr> {
    let own: BTreeSet<String> = descriptors(process).into_iter().collect();
    let text = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let rows = text.lines().skip(1).map(|l| l.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row.len() > 9 && row[3] == "0A" && own.contains(&format!("socket:[{}]", row[9])))
        .filter_map(|row| {
            let (address, port) = row[1].split_once(':')?;
            let address = u32::from_str_radix(address, 16).ok()?.to_le_bytes();
            Some(SocketAddr::from((Ipv4Addr::from(address), u16::from_str_radix(port, 16).ok()?)))
        })
        .collect()
}

/// What came of a world.
struct SiegeOutcome {
    losses: String,
    /// From when the last rank was started to the end of the first step.
    start: Duration,
    /// Sockets of each rank's launcher, at the end of the run.
    descriptors: Vec<usize>,
    /// The most descriptors that one had while strangers came.
    most: usize,
    ports: usize,
}

/// Runs a world, to all of whose ports strangers connect so many times: half before the last rank is started.
fn besiege(bench: &Bench, count: usize) -> SiegeOutcome {
    let meeting = port();
    let mut children: Vec<Child> = (0..RANKS - 1).map(|rank| start(bench, rank, meeting)).collect();
    while listens(children[0].id()).is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let processes = std::sync::Mutex::new(children.iter().map(Child::id).collect::<Vec<_>>());
    let (tried, over) = (AtomicUsize::new(0), AtomicBool::new(count == 0));
    let (start, most, ports) = std::thread::scope(|scope| {
        let attacks = scope.spawn(|| {
            let mut attacker = Attacker::new(&secret());
            let (mut most, mut ports) = (0, BTreeSet::new());
            let mut open: Vec<SocketAddr> = vec![];
            for k in 0..count {
                if k % 50 == 0 {
                    let processes = processes.lock().unwrap().clone();
                    open = processes.iter().flat_map(|p| listens(*p)).collect();
                    // The ranks listen at the loopback interface alone.
                    assert!(open.iter().all(|a| a.ip().is_loopback()), "{open:?}");
                    ports.extend(open.iter().copied());
                    most = processes.iter().map(|p| descriptors(*p).len()).fold(most, usize::max);
                    attacker.drip();
                }
                // When all ranks have come, nobody listens any more, which is all that strangers find.
                let address = if open.is_empty() { SocketAddr::from(([127, 0, 0, 1], meeting)) } else { open[k % open.len()] };
                let purpose = if address.port() == meeting { Purpose::Meeting } else { Purpose::Wire };
                let _ = attacker.attack(address, purpose, Attack::ALL[k / open.len().max(1) % Attack::ALL.len()]);
                tried.store(k + 1, Ordering::Release);
            }
            over.store(true, Ordering::Release);
            (most, ports.len())
        });
        while tried.load(Ordering::Acquire) < count / 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begun = Instant::now();
        children.push(self::start(bench, RANKS - 1, meeting));
        processes.lock().unwrap().push(children[RANKS as usize - 1].id());
        let mut out = BufReader::new(children[0].stdout.take().unwrap());
        until(&mut out, "began");
        let start = begun.elapsed();
        let (most, ports) = attacks.join().unwrap();
        until(&mut out, "done");
        children[0].stdout = Some(out.into_inner());
        (start, most, ports)
    });
    assert!(over.into_inner());
    // Pipes of ranks that have ended may be closed or not, so only sockets are counted.
    let sockets = |process| descriptors(process).iter().filter(|d| d.starts_with("socket:")).count();
    let descriptors = children.iter().map(|c| sockets(c.id())).collect();
    children[0].stdin.take().unwrap().write_all(b"\n").unwrap();
    let said = children.into_iter().map(|c| String::from_utf8(c.wait_with_output().unwrap().stdout).unwrap()).collect::<Vec<_>>();
    let losses = said[0].split_once('[').and_then(|t| t.1.split_once(']')).map(|t| t.0.to_owned()).unwrap_or_default();
    assert!(said[1..].iter().all(|s| s.contains("[]")), "{said:?}");
    SiegeOutcome { losses, start, descriptors, most, ports }
}

#[test]
fn losses_under_siege_are_those_of_an_undisturbed_run() {
    if let Ok(text) = std::env::var(JOINER) {
        return joiner(&text);
    }
    let count: Option<usize> = std::env::var("HOSTILE").ok().map(|n| n.parse().unwrap());
    let bench = Bench::native(&fixture::streamed(fixture::job(&SPLIT)), &SPLIT);
    bench.feed(if count.is_some() { 3000 } else { 100 });
    let mut alone = vec![];
    run(&bench.artifact, &bench.options(), &mut |p| alone.push(format!("{:?} {:?}", p.loss, p.grad_norm))).unwrap();
    let quiet = besiege(&bench, 0);
    let besieged = besiege(&bench, count.unwrap_or(300));
    assert_eq!(quiet.losses, alone.join(","));
    assert_eq!(besieged.losses, quiet.losses);
    // The strangers have left no socket, and never took many descriptors.
    for (there, was) in besieged.descriptors.iter().zip(&quiet.descriptors) {
        assert!(there <= was, "sockets: {:?}, {:?} in an undisturbed run", besieged.descriptors, quiet.descriptors);
    }
    assert!(besieged.most < 400, "{} descriptors", besieged.most);
    if let Some(count) = count {
        println!(
            "{count} hostile connections to {} ports: the start took {:?}, {:?} undisturbed; sockets {:?} at the end, {:?} undisturbed, {} descriptors at most",
            besieged.ports, besieged.start, quiet.start, besieged.descriptors, quiet.descriptors, besieged.most
        );
        assert!(besieged.start < quiet.start + Duration::from_secs(2));
    }
}

/// Set for a process that attacks a run on another machine (`tests/hostile.sh`): how many connections, where ranks
/// meet, where else they listen.
const ATTACK: &str = "MCC_TEST_ATTACK";

/// What such a process does; without the variable there is nothing to do.
#[test]
fn attacker() {
    let Ok(text) = std::env::var(ATTACK) else { return };
    let (count, addresses) = text.split_once(' ').unwrap();
    let addresses: Vec<SocketAddr> = addresses.split_whitespace().map(|a| a.parse().unwrap()).collect();
    let mut attacker = Attacker::new(&secret());
    for k in 0..count.parse().unwrap() {
        let place = k % addresses.len();
        let purpose = if place == 0 { Purpose::Meeting } else { Purpose::Wire };
        let _ = attacker.attack(addresses[place], purpose, Attack::ALL[k / addresses.len() % Attack::ALL.len()]);
        if k % 50 == 0 {
            attacker.drip();
        }
    }
}

/// Plays rank 0 of two, knowing all that rank 0 knows, and answers rank 1's first word with what `plan` makes of it.
/// How many times rank 1's process was heard of while it ran.
fn play_rank_0(meeting: &RendezvousEndpoint, trust: &Trust, id: &str, plan: impl Fn(&[u8]) -> Vec<u8>) -> usize {
    let deadline = Instant::now() + Duration::from_secs(30);
    let member = Member { rank: 0, world: 2, id: id.into() };
    let Ok(mut star) = meet(meeting, &member, trust, deadline, &mut |_| {}) else { return 0 };
    let mut heard = 0;
    let mut round = |answer: &dyn Fn(&[u8]) -> Vec<u8>| star.round(Ok(vec![]), deadline, |_, words| Ok(answer(&words[1]))).is_ok();
    // Rank 0 sends its plan, then that it knows of nobody's memory, then that all may begin.
    if round(&plan) && round(&|_| vec![0]) && round(&|_| vec![]) {
        let StarLinks::Hub(links) = star else { unreachable!("rank 0 is the hub") };
        let mut link = links.into_iter().next().unwrap();
        while heard < 3 && link.hear::<u8>(Some(Duration::from_secs(10))).is_ok() {
            heard += 1;
        }
    }
    heard
}

/// A plan for two ranks, of which the second is where its word says, with whatever else.
fn plan(word: &[u8], edit: &dyn Fn(&mut Vec<RankPlacement>)) -> Vec<u8> {
    type Hello = (String, String, u16, u64, Vec<u8>);
    let (host, _, port, cores, _): Hello = postcard::from_bytes(word).unwrap();
    let place = |machine| RankPlacement { machine, host: host.clone(), address: Ipv4Addr::LOCALHOST.into(), port, cores };
    let mut places = vec![place(0), place(1)];
    edit(&mut places);
    postcard::to_stdvec(&([7u8; 16], places, None::<Vec<u8>>)).unwrap()
}

/// What a run of rank 1's came to, with a false rank 0; and how many times it was heard of.
fn with_false_rank_0(bench: &Bench, plan: impl Fn(&[u8]) -> Vec<u8>) -> (String, usize) {
    let worlds = world(&[0, 1]);
    std::thread::scope(|scope| {
        let options = RunOptions { world: Some(worlds[1].clone()), ..bench.options() };
        let rank = scope.spawn(move || run(&bench.artifact, &options, &mut |_| {}).unwrap_err().to_string());
        let heard = play_rank_0(&worlds[0].meeting, &Trust::Loopback, &bench.artifact.id, plan);
        (rank.join().unwrap(), heard)
    })
}

/// Set for a process that plays rank 0 for a rank on another machine (`tests/hostile.sh`): the host and port where
/// they meet, the artifact, another one that it would like to be run, and what it does. It knows the secret if that
/// is in its environment.
const FALSE: &str = "MCC_TEST_FALSE_RANK_0";

/// What such a process does, which ends when it has been found out; without the variable there is nothing to do.
#[test]
fn false_rank_0() {
    let Ok(text) = std::env::var(FALSE) else { return };
    let [host, port, artifact, other, how] = text.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let meeting = RendezvousEndpoint { host: host.into(), port: port.parse().unwrap() };
    let trust = std::env::var("MCC_SECRET").map_or(Trust::Insecure, |s| Trust::secret("MCC_SECRET", s.as_bytes()).unwrap());
    let [own, other] = [artifact, other].map(|dir| artifact::read(dir.as_ref(), &AcceptedArtifacts::Anyones).unwrap());
    let orders = serde_json::to_vec(&serde_json::json!({ "artifact": other.dir, "id": other.id, "steps": 4, "save": "stolen.safetensors" })).unwrap();
    let heard = play_rank_0(&meeting, &trust, &own.id, |word| match how {
        "orders" => orders.clone(),
        "elsewhere" => plan(word, &|p| p[1].port ^= 1),
        "more" => [plan(word, &|_| {}), orders.clone()].concat(),
        _ => panic!("{how}"),
    });
    println!("heard {heard} times");
}

/// An artifact whose library leaves a mark when it is loaded.
fn trap(mark: &std::path::Path) -> Bench {
    let constructor = format!(
        "#[used] #[unsafe(link_section = \".init_array\")] static TRAP: extern \"C\" fn() = {{ extern \"C\" fn f() {{ let _ = std::fs::write({mark:?}, \"\"); }} f }};\n"
    );
    Bench::native_with(&fixture::job(&PAIR), &PAIR, &constructor)
}

const PAIR: Split = Split { microbatches: 1, pp: 1, dp: 2, tp: 1 };

#[test]
fn a_false_rank_0_chooses_no_code_and_no_options() {
    let bench = Bench::native(&fixture::job(&PAIR), &PAIR);
    let mark = bench.path("mark");
    let trap = trap(&mark);
    // Rank 0 answers with what ranks once took for their orders, or with a false plan.
    let orders = serde_json::json!({ "artifact": trap.artifact.dir, "id": trap.artifact.id, "steps": 4, "save": bench.path("saved") });
    let orders = serde_json::to_vec(&orders).unwrap();
    type Answer<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;
    let cases: [(&str, Answer); 7] = [
        ("a rank said something unreadable", &|_| orders.clone()),
        ("what rank 0 says of the ranks cannot be: 3 places for 2 ranks", &|w| plan(w, &|p| p.push(p[1].clone()))),
        ("another place for rank 1 than its own", &|w| plan(w, &|p| p[1].port ^= 1)),
        ("another place for rank 1 than its own", &|w| plan(w, &|p| p[1].host += "x")),
        ("rank 1 on machine 7 of 1", &|w| plan(w, &|p| p[1].machine = 7)),
        ("rank 1 at 10.0.0.1, though ranks without a secret are all on one machine", &|w| plan(w, &|p| p[1].address = [10, 0, 0, 1].into())),
        ("rank 0's `mcc run` on 127.0.0.1 is gone", &|w| [plan(w, &|_| {}), orders.clone()].concat()),
    ];
    for (says, answer) in cases {
        let (error, heard) = with_false_rank_0(&bench, answer);
        assert!(error.contains(says), "{error}");
        // Rank 1 ran only with a plan that can be, and what it ran was its own.
        assert_eq!(heard > 0, says.contains("is gone"), "{error}");
        assert!(!mark.exists() && !bench.path("saved").exists(), "{says}");
    }
    // The trap works if somebody runs it.
    run(&trap.artifact, &trap.options(), &mut |_| {}).unwrap();
    assert!(mark.exists());
}

#[test]
fn a_rank_0_without_the_secret_learns_nothing_and_is_left() {
    let bench = Bench::new(&PAIR);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let meeting = RendezvousEndpoint { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
    let world = World { launcher: Launcher::Torchrun, rank: 1, size: 2, node: None, meeting };
    let options = RunOptions { world: Some(world), trust: secret(), meeting_limit: Duration::from_secs(1), ..bench.options() };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let heard = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Acquire) {
                let mut stream = listener.accept().unwrap().0;
                let _ = stream.write_all(&[7; 64]);
                let _ = stream.shutdown(Shutdown::Write);
                most = stream.read_to_end(&mut vec![]).unwrap_or(0).max(most);
            }
            most
        });
        let error = run(&bench.artifact, &options, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("has not proved that it knows this rank's secret: all ranks need the same (MCC_SECRET or --secret-file)"), "{error}");
        over.store(true, Ordering::Release);
        drop(TcpStream::connect(listener.local_addr().unwrap()));
        // The rank has sent a mark, a nonce and a proof.
        assert_eq!(heard.join().unwrap(), 72);
    });
}

#[test]
fn ranks_without_a_secret_meet_on_their_machine_alone() {
    let bench = Bench::new(&PAIR);
    for rank in 0..2 {
        let meeting = RendezvousEndpoint { host: "192.0.2.1".into(), port: 9 };
        let world = World { launcher: Launcher::Torchrun, rank, size: 2, node: None, meeting };
        let error = run(&bench.artifact, &RunOptions { world: Some(world), ..bench.options() }, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1:9, which is no loopback address") && error.contains("export MCC_SECRET="), "{error}");
    }
}

/// A wire between rank 1's process and rank 0's on which one bit changes, in the first message after the first step.
#[test]
fn what_is_changed_on_its_way_ends_the_run_with_that() {
    let bench = Bench::new(&PAIR);
    bench.feed(100_000);
    let worlds = world(&[0, 1]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut far = worlds[1].clone();
    far.meeting.port = listener.local_addr().unwrap().port();
    let (changes, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Rank 1 tries again until rank 0 listens.
            while let Ok((near, _)) = listener.accept() {
                if over.load(Ordering::Acquire) {
                    return;
                }
                let Ok(far) = TcpStream::connect(("127.0.0.1", worlds[0].meeting.port)) else { continue };
                for (from, to, changes) in [(&near, &far, Some(&changes)), (&far, &near, None)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    scope.spawn(move || {
                        let mut bytes = [0; 1 << 16];
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            bytes[n / 2] ^= u8::from(changes.is_some_and(|c| c.swap(false, Ordering::AcqRel)));
                            if to.write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                        let _ = from.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        let ends = super::join(
            &bench,
            &[worlds[0].clone(), far.clone()],
            |_| bench.options(),
            |_, p| {
                if p.step == 1 {
                    changes.store(true, Ordering::Release);
                }
            },
        );
        over.store(true, Ordering::Release);
        drop(TcpStream::connect(("127.0.0.1", far.meeting.port)));
        for error in super::errors(ends) {
            assert!(error.contains("of what rank 1's `mcc run` on ") && error.contains("data in flight was tampered with"), "{error}");
        }
    });
}
