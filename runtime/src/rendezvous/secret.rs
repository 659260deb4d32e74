//! The secret by which ranks of one run know each other, and what ranks do that have none.

use crate::paths;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Fewest bytes of a secret.
const LEAST: usize = 16;
/// Most bytes of a secret.
const MOST: usize = 64 << 10;

/// A key of BLAKE3's keyed hash. Debug output does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key([u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// The key that a secret stands for.
    fn of(secret: &[u8]) -> Key {
        Key(blake3::derive_key("mcc 2026 secret of a run", secret))
    }

    /// A hash under this key that is about to take what `label` names. All labels have one length, so hashes with two
    /// labels are never of the same bytes.
    pub(super) fn labelled(&self, label: &[u8; 8]) -> blake3::Hasher {
        let mut hasher = self.hasher();
        hasher.update(label);
        hasher
    }

    /// A hash under this key.
    pub(super) fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }

    pub(super) fn from_hash(hash: blake3::Hash) -> Key {
        Key(*hash.as_bytes())
    }

    /// The key of what the ranks of one run write to other machines.
    pub fn of_run(&self, run: &[u8; 16]) -> Key {
        let mut hasher = self.labelled(b"mcc run ");
        hasher.update(run);
        Key::from_hash(hasher.finalize())
    }
}

/// Whom a rank believes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// A rank believes whoever proves that it knows the secret.
    Secret(Key),
    /// Whoever is on this machine: ranks meet at a loopback address or not at all.
    #[default]
    Loopback,
    /// A rank believes whoever reaches the meeting.
    Insecure,
}

impl Trust {
    /// The key of the handshake. Without a secret it is one that everybody can make.
    pub fn key(&self) -> Key {
        match self {
            Trust::Secret(key) => key.clone(),
            Trust::Loopback | Trust::Insecure => Key::of(b""),
        }
    }

    /// From the bytes of a secret, which `from` names in errors (`MCC_SECRET`). A newline at the end does not count.
    ///
    /// # Errors
    /// If it is shorter than 16 bytes or longer than 64 KiB.
    pub fn secret(from: &str, bytes: &[u8]) -> Result<Trust, SecretError> {
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        match bytes.len() {
            LEAST..=MOST => Ok(Trust::Secret(Key::of(bytes))),
            found => Err(SecretError::Length { from: from.into(), found }),
        }
    }

    /// From a file that only its owner may read.
    ///
    /// # Errors
    /// If others may read or write it, it cannot be read, or its length is wrong.
    pub fn secret_file(path: &Path) -> Result<Trust, SecretError> {
        let failed = |cause| SecretError::File { file: path.into(), cause };
        let about = fs::metadata(path).map_err(failed)?;
        if let Some(is) = paths::kind(&about) {
            return Err(SecretError::NoFile { path: path.into(), is });
        }
        let file = File::open(path).map_err(failed)?;
        let mode = about.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(SecretError::Shared { file: path.into(), mode });
        }
        let mut bytes = vec![];
        file.take(MOST as u64 + 3).read_to_end(&mut bytes).map_err(failed)?;
        Trust::secret(&path.display().to_string(), &bytes)
    }
}

/// Why there is no secret to use.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum SecretError {
    #[error("the secret file `{}`: {cause}", .file.display())]
    File { file: PathBuf, cause: io::Error },
    #[error("the secret file `{}` is {is}: name a file, such as `openssl rand -hex 32` writes", .path.display())]
    NoFile { path: PathBuf, is: &'static str },
    #[error("the secret file `{0}` has mode {mode:03o}, so that others can read or write it: chmod 600 {0}", .file.display())]
    Shared { file: PathBuf, mode: u32 },
    #[error("the secret of `{from}` has {found} bytes, it should have {LEAST} to {MOST}: `openssl rand -hex 32` makes a good one")]
    Length { from: String, found: usize },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_that_are_short_long_or_open_to_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        type ExpectedSecret = Result<&'static [u8], &'static str>;
        let cases: [(&[u8], u32, ExpectedSecret); 7] = [
            (b"0123456789abcdef\n", 0o600, Ok(b"0123456789abcdef")),
            (b"0123456789abcdef", 0o400, Ok(b"0123456789abcdef")),
            (b"0123456789abcdef ", 0o600, Ok(b"0123456789abcdef ")),
            (b"0123456789abcde\n", 0o600, Err("has 15 bytes, it should have 16 to 65536: `openssl rand")),
            (b"", 0o600, Err("has 0 bytes")),
            (b"0123456789abcdef\n", 0o640, Err("has mode 640, so that others can read or write it: chmod 600 ")),
            (&[b'a'; MOST + 1], 0o600, Err("has 65537 bytes")),
        ];
        for (bytes, mode, wanted) in cases {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            match (Trust::secret_file(&path), wanted) {
                (Ok(trust), Ok(secret)) => assert_eq!(trust, Trust::Secret(Key::of(secret))),
                (Err(e), Err(says)) => assert!(e.to_string().contains(says), "{e}"),
                (found, _) => panic!("{found:?}, not {wanted:?}"),
            }
            fs::remove_file(&path).unwrap();
        }
        assert!(Trust::secret_file(&path).unwrap_err().to_string().contains("No such file"));
        assert!(Trust::secret_file(dir.path()).unwrap_err().to_string().contains("is a directory: name a file"));
    }

    #[test]
    fn keys_do_not_show_in_debug_output() {
        assert_eq!(format!("{:?}", Trust::secret("x", &[7; 16]).unwrap()), "Secret(Key(..))");
    }
}
