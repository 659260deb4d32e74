//! Attackers who connect to the ports of a run: all that they can do without its secret.

use runtime::rendezvous::{Purpose, Trust, knock, random};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// What an attacker does.
#[derive(Clone, Copy, Debug)]
pub enum Attack {
    /// Nothing.
    Idle,
    /// Bytes that mean nothing.
    Random,
    /// A byte now and then, of a handshake that begins well.
    Slow,
    /// A right beginning, then no proof.
    HalfOpen,
    /// The largest lengths there are.
    Giant,
    /// A proof that is none.
    Forged,
    /// The listener's own numbers as a proof.
    Reflected,
    /// What a rank said to another listener.
    Replayed,
    /// All of a handshake, with the key of runs that have no secret.
    Keyless,
    /// Gone before anybody looks.
    Gone,
}

impl Attack {
    pub const ALL: [Attack; 10] = [
        Attack::Idle,
        Attack::Random,
        Attack::Slow,
        Attack::HalfOpen,
        Attack::Giant,
        Attack::Forged,
        Attack::Reflected,
        Attack::Replayed,
        Attack::Keyless,
        Attack::Gone,
    ];
}

/// One who attacks with all there is.
pub struct Attacker {
    /// What a rank said to a listener that was this one.
    recorded: [Vec<u8>; 2],
    /// Those who stay, and whether they are slow.
    open: Vec<(TcpStream, bool)>,
}

/// How long a listener has to answer, which it need not.
const ANSWERS: Duration = Duration::from_millis(10);
/// Most that stay at a time: fewer than a process may have files.
const STAY: usize = 500;

fn mark(purpose: Purpose) -> &'static [u8; 8] {
    match purpose {
        Purpose::Meeting => b"mcc meet",
        Purpose::Wire => b"mcc wire",
    }
}

impl Attacker {
    /// Who has heard a rank with this secret knock, at a listener of its own.
    pub fn new(trust: &Trust) -> Attacker {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut recorded = [vec![0; 40], vec![0; 32]];
        std::thread::scope(|scope| {
            let until = Instant::now() + Duration::from_secs(10);
            let rank = scope.spawn(move || knock(TcpStream::connect(address).unwrap(), &trust.key(), Purpose::Meeting, b"hello", until));
            let mut heard = listener.accept().unwrap().0;
            heard.read_exact(&mut recorded[0]).unwrap();
            heard.write_all(&[1; 32]).unwrap();
            heard.read_exact(&mut recorded[1]).unwrap();
            drop(heard);
            // The rank said nothing more to one who has proved nothing.
            assert!(rank.join().unwrap().is_err());
        });
        Attacker { recorded, open: vec![] }
    }

    /// Knocks once. A listener that is not there any more is none to attack.
    pub fn attack(&mut self, address: SocketAddr, purpose: Purpose, attack: Attack) -> std::io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(ANSWERS))?;
        let greeting = [&mark(purpose)[..], &random::<32>()?].concat();
        let mut answer = [0; 32];
        match attack {
            Attack::Idle => {}
            Attack::Random => stream.write_all(&random::<200>()?)?,
            Attack::Slow => stream.write_all(&greeting[..9])?,
            Attack::HalfOpen => stream.write_all(&greeting)?,
            Attack::Giant => stream.write_all(&[255; 100])?,
            Attack::Forged => {
                stream.write_all(&greeting)?;
                let _ = stream.read_exact(&mut answer);
                stream.write_all(&random::<32>()?)?;
                stream.write_all(&[255; 100])?;
            }
            Attack::Reflected => {
                stream.write_all(&greeting)?;
                let _ = stream.read_exact(&mut answer);
                stream.write_all(&answer)?;
            }
            Attack::Replayed => {
                stream.write_all(&self.recorded[0])?;
                let _ = stream.read_exact(&mut answer);
                stream.write_all(&self.recorded[1])?;
            }
            Attack::Keyless => {
                let until = Instant::now() + ANSWERS;
                assert!(knock(stream, &Trust::Insecure.key(), purpose, &[0], until).is_err(), "a listener that has a secret took its lack for it");
                return Ok(());
            }
            Attack::Gone => return Ok(()),
        }
        self.open.push((stream, matches!(attack, Attack::Slow)));
        if self.open.len() > STAY {
            self.open.drain(..STAY / 2);
        }
        Ok(())
    }

    /// Those who are slow say one byte more.
    pub fn drip(&mut self) {
        for (stream, _) in self.open.iter_mut().filter(|(_, is_slow)| *is_slow) {
            let _ = stream.write_all(&[0]);
        }
    }
}
