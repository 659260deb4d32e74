use super::*;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

const MEMBER: &str = "MCC_TEST_MEMBER";

/// What a process of the tests below does: `rank world id address milliseconds [error]`. Without them there is
/// nothing to do.
#[test]
fn member() {
    let Ok(text) = std::env::var(MEMBER) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let number = |k: usize| words[k].parse::<u64>().unwrap();
    let member = Member { rank: number(0), world: number(1), id: words[2].into() };
    let deadline = Instant::now() + Duration::from_millis(number(4));
    let word = words.get(5).map_or(Ok(vec![b'a' + member.rank as u8]), |e| Err(e.replace('_', " ")));
    let met = meet(&RendezvousEndpoint::parse(words[3]).unwrap(), &member, &Trust::Loopback, deadline, &mut |_| {})
        .and_then(|mut star| star.round(word, deadline, |_, words| Ok(words.concat())));
    println!("[{}]", met.map_or_else(|e| e.to_string(), |w| String::from_utf8(w).unwrap()));
}

/// A process for each of `members` (rank, world, id), the last one first; what each says in the end.
fn processes(members: &[(u64, u64, &str)], milliseconds: u64) -> Vec<String> {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let start = |(rank, world, id): &(u64, u64, &str)| {
        let (id, error) = id.split_once(' ').map_or((*id, String::new()), |(id, e)| (id, format!(" rank_{rank}:_{e}")));
        let text = format!("{rank} {world} {id} {address} {milliseconds}{error}");
        let arguments = ["--exact", "rendezvous::tests::member", "--nocapture"];
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(arguments).env(MEMBER, text).stdout(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = members.iter().rev().map(start).collect();
    let said = |o: Output| {
        let text = String::from_utf8(o.stdout).unwrap();
        text.split_once('[').and_then(|t| t.1.split_once(']')).map(|t| t.0.to_owned()).unwrap_or(text)
    };
    children.into_iter().rev().map(|c| said(c.wait_with_output().unwrap())).collect()
}

#[test]
fn processes_meet_in_any_order() {
    let members: Vec<(u64, u64, &str)> = (0..4).map(|r| (r, 4, "a")).collect();
    assert_eq!(processes(&members, 30_000), ["abcd"; 4]);
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all() {
    assert_eq!(processes(&[(0, 3, "a"), (2, 3, "a")], 1_500), ["rank 1 did not come in time"; 2]);
}

#[test]
fn ranks_of_another_run_or_world_are_refused() {
    assert_eq!(processes(&[(0, 2, "a"), (1, 2, "b")], 30_000), ["rank 1 runs b, rank 0 runs a"; 2]);
    // A rank that comes when the meeting is already to be refused hears why, too.
    assert_eq!(processes(&[(0, 3, "a"), (1, 3, "b"), (2, 3, "a")], 30_000), ["rank 1 runs b, rank 0 runs a"; 3]);
    assert_eq!(processes(&[(0, 2, "a"), (1, 3, "a")], 30_000), ["rank 1 is of a world of 3 ranks, rank 0 of one of 2"; 2]);
}

#[test]
fn a_rank_that_has_an_error_tells_all() {
    assert_eq!(processes(&[(0, 3, "a"), (1, 3, "a"), (2, 3, "a x")], 30_000), ["rank 2: x"; 3]);
}

#[test]
fn without_rank_0_others_say_where_they_looked() {
    let said = processes(&[(1, 2, "a")], 200);
    assert!(said[0].starts_with("rank 1 does not reach rank 0 at 127.0.0.1:"), "{said:?}");
}

#[test]
fn a_rank_with_another_secret_is_no_rank_and_both_sides_say_what_to_look_for() {
    let meeting = RendezvousEndpoint::parse(&TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(800);
    let said = std::thread::scope(|scope| {
        let meets = |rank: u64| {
            let meeting = &meeting;
            scope.spawn(move || {
                let trust = Trust::secret("test", &[rank as u8; 16]).unwrap();
                let met = meet(meeting, &Member { rank, world: 2, id: "a".into() }, &trust, deadline, &mut |_| {});
                met.err().unwrap().to_string()
            })
        };
        [meets(0), meets(1)].map(|t| t.join().unwrap())
    });
    assert!(said[0].starts_with("rank 1 did not come in time; ") && said[0].contains("did not prove that they know this run's secret"), "{said:?}");
    assert!(said[1].contains("all ranks need the same (MCC_SECRET or --secret-file)"), "{said:?}");
}
