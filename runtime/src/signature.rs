//! Who made an artifact: Ed25519 signatures (RFC 8032) with the keys of files that `openssl` makes and reads.
//!
//! ```text
//! openssl genpkey -algorithm ed25519 -out secret.pem                     # `mcc compile --sign secret.pem`
//! openssl pkey -in secret.pem -pubout -out public.pem                    # `mcc run --trust public.pem`
//! openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in manifest.json -sigfile manifest.sig
//! ```

use crate::paths;
use ed25519_dalek::pkcs8::{DecodePrivateKey, DecodePublicKey};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Most bytes of a file with a key or a signature that are looked at.
const MOST: u64 = 1 << 16;

/// How to make a pair of keys, for messages.
const MAKE_SECRET: &str = "`openssl genpkey -algorithm ed25519 -out secret.pem` makes one";
const MAKE_PUBLIC: &str = "`openssl pkey -in secret.pem -pubout -out public.pem` makes one of a secret key";

/// Why a key or a signature could not be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum KeyError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}` is {is}: keys and signatures are read from files", .file.display())]
    NoFile { file: PathBuf, is: &'static str },
    #[error("`{0}` has mode {mode:03o}, so that others can read or write the secret key: chmod 600 {0}", .file.display())]
    Shared { file: PathBuf, mode: u32 },
    #[error("`{}` {}, but --sign wants the secret key of an Ed25519 pair in PEM: {MAKE_SECRET}", .file.display(), .found)]
    Secret { file: PathBuf, found: KeyKind },
    #[error("`{}` {}, but --trust wants the public key of an Ed25519 pair in PEM: {MAKE_PUBLIC}", .file.display(), .found)]
    Public { file: PathBuf, found: KeyKind },
    #[error("`{}` is damaged: a signature has 64 bytes, it has {bytes}", .file.display())]
    Signature { file: PathBuf, bytes: usize },
}

/// What kind of key a file holds instead of the one that it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// A secret key in PEM, be it of another kind.
    Secret,
    /// A public key in PEM, be it of another kind.
    Public,
    /// A key of OpenSSH's, secret or public.
    OpenSsh,
    /// Something else than the kinds of keys that are told apart.
    Other,
}

impl fmt::Display for KeyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeyKind::Secret => "has a secret key",
            KeyKind::Public => "has a public key",
            KeyKind::OpenSsh => "has a key of OpenSSH's",
            KeyKind::Other => "has no key that is known here",
        })
    }
}

impl KeyKind {
    fn in_text(text: &str) -> KeyKind {
        match () {
            () if text.contains("OPENSSH") || text.starts_with("ssh-") => KeyKind::OpenSsh,
            () if text.contains("PRIVATE KEY-----") => KeyKind::Secret,
            () if text.contains("PUBLIC KEY-----") => KeyKind::Public,
            () => KeyKind::Other,
        }
    }
}

/// Signs artifacts. It is shown nowhere.
pub struct SecretKey(SigningKey);

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(..)")
    }
}

impl SecretKey {
    /// Reads a PEM file (PKCS#8, RFC 8410).
    ///
    /// # Errors
    /// If there is none, it has something else, or others than its owner can read or write it.
    pub fn read(file: &Path) -> Result<SecretKey, KeyError> {
        let text = String::from_utf8_lossy(&bytes(file)?).into_owned();
        let wrong = |_| KeyError::Secret { file: file.to_path_buf(), found: KeyKind::in_text(&text) };
        let key = SigningKey::from_pkcs8_pem(&text).map(SecretKey).map_err(wrong)?;
        let about = fs::metadata(file).map_err(|cause| KeyError::Io { file: file.to_path_buf(), cause })?;
        match about.permissions().mode() & 0o777 {
            mode if mode & 0o077 != 0 => Err(KeyError::Shared { file: file.to_path_buf(), mode }),
            _ => Ok(key),
        }
    }

    /// The signature of some bytes.
    pub fn sign(&self, bytes: &[u8]) -> [u8; 64] {
        self.0.sign(bytes).to_bytes()
    }
}

/// Knows what a secret key has signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

impl PublicKey {
    /// Reads a PEM file (SPKI, RFC 8410).
    ///
    /// # Errors
    /// If there is none, or it has something else.
    pub fn read(file: &Path) -> Result<PublicKey, KeyError> {
        let text = String::from_utf8_lossy(&bytes(file)?).into_owned();
        let wrong = |_| KeyError::Public { file: file.to_path_buf(), found: KeyKind::in_text(&text) };
        VerifyingKey::from_public_key_pem(&text).map(PublicKey).map_err(wrong)
    }

    /// Whether its secret key has signed these bytes. Keys and signatures of which several would do are refused
    /// (`verify_strict`).
    pub fn has_signed(&self, bytes: &[u8], signature: &[u8; 64]) -> bool {
        self.0.verify_strict(bytes, &Signature::from_bytes(signature)).is_ok()
    }
}

fn bytes(file: &Path) -> Result<Vec<u8>, KeyError> {
    // Opening a pipe would wait for its writer.
    let kind = fs::metadata(file).ok().and_then(|about| paths::kind(&about));
    if let Some(is) = kind {
        return Err(KeyError::NoFile { file: file.to_path_buf(), is });
    }
    let mut out = vec![];
    let read = fs::File::open(file).and_then(|f| f.take(MOST).read_to_end(&mut out));
    read.map_err(|cause| KeyError::Io { file: file.to_path_buf(), cause })?;
    Ok(out)
}

/// Reads the file of a signature; none if there is no such file.
///
/// # Errors
/// If it is none.
pub fn read(file: &Path) -> Result<Option<[u8; 64]>, KeyError> {
    match bytes(file) {
        Err(KeyError::Io { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
        Ok(bytes) => match bytes.as_slice().try_into() {
            Ok(signature) => Ok(Some(signature)),
            Err(_) => Err(KeyError::Signature { file: file.to_path_buf(), bytes: bytes.len() }),
        },
    }
}

/// Tests, and the keys that those of other modules use too.
#[cfg(test)]
pub mod tests {
    use super::*;

    /// The pair of RFC 8410, 10.1 and 10.3: everybody knows it.
    pub const SECRET: &str =
        "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    /// The public half of [`SECRET`].
    pub const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";
    /// The public key of RFC 8032, 7.1, test 1.
    pub const OTHER: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n-----END PUBLIC KEY-----\n";

    #[test]
    fn what_a_key_has_signed_its_public_half_knows() {
        let dir = tempfile::tempdir().unwrap();
        let (secret, public) = (dir.path().join("secret.pem"), dir.path().join("public.pem"));
        fs::write(&secret, SECRET).unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o640)).unwrap();
        let error = SecretKey::read(&secret).unwrap_err().to_string();
        assert!(error.contains("has mode 640") && error.contains("chmod 600"), "{error}");
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&public, PUBLIC).unwrap();
        let (secret, public) = (SecretKey::read(&secret).unwrap(), PublicKey::read(&public).unwrap());
        let mut signature = secret.sign(b"manifest");
        assert!(public.has_signed(b"manifest", &signature));
        assert!(!public.has_signed(b"manifesto", &signature));
        signature[5] ^= 1;
        assert!(!public.has_signed(b"manifest", &signature));
        assert_eq!(format!("{secret:?}"), "SecretKey(..)");
    }

    #[test]
    fn a_file_of_another_kind_is_named_with_a_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        assert!(PublicKey::read(dir.path()).unwrap_err().to_string().contains("is a directory: keys and signatures"));
        let cases = [
            (SECRET, "", "has a secret key, but --trust wants the public key"),
            (PUBLIC, "has a public key, but --sign wants the secret key", ""),
            ("ssh-ed25519 AAAA me@here\n", "has a key of OpenSSH's, but --sign", "has a key of OpenSSH's, but --trust"),
            ("\u{fffd}", "has no key that is known here, but --sign", "has no key that is known here, but --trust"),
        ];
        for (text, of_secret, of_public) in cases {
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
            for (result, wanted) in [(SecretKey::read(&file).map(drop), of_secret), (PublicKey::read(&file).map(drop), of_public)] {
                match result {
                    Ok(()) => assert_eq!(wanted, ""),
                    Err(e) => assert!(!wanted.is_empty() && e.to_string().contains(wanted), "{e}"),
                }
            }
        }
    }
}
