use super::*;
use crate::hostile::{Attack, Attacker};
use crate::rendezvous::{HELLO, Trust, knock};

fn secret() -> Trust {
    Trust::secret("test", b"a secret of a test").unwrap()
}

fn incoming(trust: &Trust) -> (HandshakeListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (HandshakeListener::new(listener, trust.key(), Purpose::Meeting).unwrap(), address)
}

/// Connects as a rank that says so; what it hears is that it was heard.
fn rank(address: SocketAddr, trust: &Trust, hello: &[u8]) -> Option<String> {
    let until = Instant::now() + Duration::from_secs(30);
    let mut link = knock(TcpStream::connect(address).ok()?, &trust.key(), Purpose::Meeting, hello, until).ok()?;
    link.hear(Some(Duration::from_secs(30))).ok()
}

#[test]
fn ranks_come_through_a_crowd_of_strangers() {
    let (mut incoming, address) = incoming(&secret());
    let mut attacker = Attacker::new(&secret());
    // More strangers come than are heard at a time, all before the first rank.
    for k in 0..2 * CONNECTIONS {
        attacker.attack(address, Purpose::Meeting, Attack::ALL[k % Attack::ALL.len()]).unwrap();
        assert!(k % 32 != 0 || incoming.next(Duration::ZERO).is_none());
        assert!(incoming.pending.len() <= CONNECTIONS);
    }
    let come = std::thread::spawn(move || rank(address, &secret(), b"rank 3"));
    let (mut link, hello) = incoming.next(Duration::from_secs(30)).unwrap();
    assert_eq!(hello, b"rank 3");
    link.say(&"heard", Duration::from_secs(5)).unwrap();
    assert_eq!(come.join().unwrap().as_deref(), Some("heard"));
    assert!(incoming.strangers > 0);
    drop(attacker);
    // Strangers who are gone leave nothing.
    while !incoming.pending.is_empty() {
        assert!(incoming.next(Duration::from_millis(10)).is_none());
    }
}

#[test]
fn one_that_says_too_little_goes_when_its_time_is_over() {
    let (mut incoming, address) = incoming(&secret());
    incoming.patience = Duration::from_millis(50);
    let mut attacker = Attacker::new(&secret());
    attacker.attack(address, Purpose::Meeting, Attack::Slow).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    // A byte at each look does not give it more time.
    while incoming.strangers == 0 {
        assert!(incoming.next(Duration::from_millis(10)).is_none() && Instant::now() < until);
        attacker.drip();
    }
    assert!(incoming.pending.is_empty());
}

#[test]
fn ranks_with_other_secrets_or_for_other_purposes_are_strangers() {
    let other = Trust::secret("test", b"another secret of a test").unwrap();
    let (mut incoming, address) = incoming(&secret());
    let come = std::thread::spawn(move || {
        let until = Instant::now() + Duration::from_secs(30);
        let stream = TcpStream::connect(address).unwrap();
        let wire = knock(stream, &secret().key(), Purpose::Wire, b"", until).is_ok();
        (wire, rank(address, &other, b""), rank(address, &Trust::Loopback, b""))
    });
    while !come.is_finished() {
        assert!(incoming.next(Duration::from_millis(20)).is_none());
    }
    assert_eq!(come.join().unwrap(), (false, None, None));
    assert_eq!(incoming.strangers, 3);
}

#[test]
fn a_hello_longer_than_any_is_not_heard() {
    let (mut incoming, address) = incoming(&secret());
    let come = std::thread::spawn(move || (rank(address, &secret(), &[0; HELLO + 1]), rank(address, &secret(), &[0; HELLO])));
    let (mut link, hello) = incoming.next(Duration::from_secs(30)).unwrap();
    assert_eq!(hello.len(), HELLO);
    link.say(&"heard", Duration::from_secs(5)).unwrap();
    assert_eq!(come.join().unwrap(), (None, Some("heard".into())));
}
