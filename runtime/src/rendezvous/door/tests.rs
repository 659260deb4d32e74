use super::*;
use crate::hostile::{Kind, Stranger};
use crate::rendezvous::{HELLO, Trust, knock};

fn secret() -> Trust {
    Trust::secret("test", b"a secret of a test").unwrap()
}

fn door(trust: &Trust) -> (Door, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (Door::new(listener, trust.key(), Purpose::Meeting).unwrap(), address)
}

/// Connects as a rank that says so; what it hears is that it was heard.
fn rank(address: SocketAddr, trust: &Trust, hello: &[u8]) -> Option<String> {
    let until = Instant::now() + Duration::from_secs(30);
    let mut link = knock(TcpStream::connect(address).ok()?, &trust.key(), Purpose::Meeting, hello, until).ok()?;
    link.hear(Some(Duration::from_secs(30))).ok()
}

#[test]
fn ranks_come_through_a_crowd_of_strangers() {
    let (mut door, address) = door(&secret());
    let mut stranger = Stranger::new(&secret());
    // More than are heard at a time, all before the first rank comes.
    for k in 0..2 * GUESTS {
        stranger.attack(address, Purpose::Meeting, Kind::ALL[k % Kind::ALL.len()]).unwrap();
        assert!(k % 32 != 0 || door.next(Duration::ZERO).is_none());
        assert!(door.guests.len() <= GUESTS);
    }
    let come = std::thread::spawn(move || rank(address, &secret(), b"rank 3"));
    let (mut link, hello) = door.next(Duration::from_secs(30)).unwrap();
    assert_eq!(hello, b"rank 3");
    link.say(&"heard", Duration::from_secs(5)).unwrap();
    assert_eq!(come.join().unwrap().as_deref(), Some("heard"));
    assert!(door.strangers > 0);
    drop(stranger);
    // Those who are gone leave nothing.
    while !door.guests.is_empty() {
        assert!(door.next(Duration::from_millis(10)).is_none());
    }
}

#[test]
fn one_that_says_too_little_goes_when_its_time_is_over() {
    let (mut door, address) = door(&secret());
    door.patience = Duration::from_millis(50);
    let mut stranger = Stranger::new(&secret());
    stranger.attack(address, Purpose::Meeting, Kind::Slow).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    // A byte at each look does not help it.
    while door.strangers == 0 {
        assert!(door.next(Duration::from_millis(10)).is_none() && Instant::now() < until);
        stranger.drip();
    }
    assert!(door.guests.is_empty());
}

#[test]
fn ranks_with_other_secrets_or_for_other_purposes_are_strangers() {
    let other = Trust::secret("test", b"another secret of a test").unwrap();
    let (mut door, address) = door(&secret());
    let come = std::thread::spawn(move || {
        let until = Instant::now() + Duration::from_secs(30);
        let stream = TcpStream::connect(address).unwrap();
        let wire = knock(stream, &secret().key(), Purpose::Wire, b"", until).is_ok();
        (wire, rank(address, &other, b""), rank(address, &Trust::Loopback, b""))
    });
    while !come.is_finished() {
        assert!(door.next(Duration::from_millis(20)).is_none());
    }
    assert_eq!(come.join().unwrap(), (false, None, None));
    assert_eq!(door.strangers, 3);
}

#[test]
fn a_hello_longer_than_any_is_not_heard() {
    let (mut door, address) = door(&secret());
    let come = std::thread::spawn(move || (rank(address, &secret(), &[0; HELLO + 1]), rank(address, &secret(), &[0; HELLO])));
    let (mut link, hello) = door.next(Duration::from_secs(30)).unwrap();
    assert_eq!(hello.len(), HELLO);
    link.say(&"heard", Duration::from_secs(5)).unwrap();
    assert_eq!(come.join().unwrap(), (None, Some("heard".into())));
}
