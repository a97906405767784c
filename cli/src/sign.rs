//! `firn sign`: permits pods of namespaces to be restored from a checkpoint, by a signature.
//!
//! Keys and signatures are minisign's (Ed25519). A key with a password is for minisign's own program, which
//! is given the trusted comment that `--print-comment` prints.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail, ensure};
use base64::prelude::{BASE64_STANDARD, Engine};
use firn_config::names;
use firn_host::{Chain, ProblemLine, atomic_file};
use firn_image::form::CheckpointDir;
use firn_image::manifest::Manifest;
use firn_image::signature::{Namespaces, Statement, checksum};
use ring::signature::Ed25519KeyPair;

use crate::args::SignArgs;
use crate::image;
use crate::output::{line, verbatim};

/// Algorithm of keys, and of signatures of a file that is not hashed beforehand.
const ED25519: &[u8] = b"Ed";
/// Bytes of a secret key's file: algorithms, salt and limits of the password, id, key, checksum.
const KEY_BYTES: usize = 158;
const MAX_KEY: u64 = 64 << 10;

/// A secret key.
struct Key {
    id: [u8; 8],
    pair: Ed25519KeyPair,
}

pub fn run(args: &SignArgs) -> Result<bool> {
    let CheckpointDir { image, layer, .. } =
        image::parts(&args.dir).map_err(|error| anyhow::anyhow!("{}", ProblemLine(&error)))?;
    let manifest =
        Manifest::read_with_bytes(&image).map_err(|error| anyhow::anyhow!("{}", ProblemLine(&error)))?;
    // Order matters: what is signed is what was compared with the image, whoever writes there meanwhile.
    let (manifest, bytes) = manifest.with_context(|| {
        format!(
            "{} has no {}: firn signs only its own checkpoints",
            image.display(),
            names::MANIFEST
        )
    })?;
    let whole = manifest.verify_images(&image);
    whole.map_err(|error| anyhow::anyhow!("{}", ProblemLine(&error)))?;
    let sum = layer.as_deref().map(|layer| {
        let sum = checksum(layer, &AtomicBool::new(false));
        sum.with_context(|| format!("cannot read {}", layer.display()))
    });
    let statement = Statement {
        namespaces: match &*args.namespace {
            [] => Namespaces::All,
            names => Namespaces::These(names.to_vec()),
        },
        layer: sum.transpose()?,
        name: args.name.clone(),
        until: args.until.clone(),
    };
    let comment = statement.to_string();
    ensure!(
        Statement::parse(&comment) == Some(statement),
        "no names of namespaces, no name or no day: {comment}"
    );
    let Some(key) = &args.key else {
        verbatim!("{comment}");
        return Ok(true);
    };
    let key = Key::read(key)?;
    let text = key.sign(&bytes, &comment);
    let written = atomic_file::write(&image, names::SIGNATURE, text.as_bytes(), 0o600);
    let path = image.join(names::SIGNATURE);
    written.map_err(|error| anyhow::anyhow!("cannot write {}: {}", path.display(), Chain(&error)))?;
    line!("{}: {comment}", path.display());
    Ok(true)
}

impl Key {
    fn read(path: &Path) -> Result<Self> {
        let file =
            firn_host::open_regular(path).with_context(|| format!("cannot open {}", path.display()))?;
        let text = firn_host::bounded::read_at_most(file, MAX_KEY)?.context("the key is too long")?;
        let parsed = String::from_utf8(text)
            .context("it is no text")
            .and_then(|text| Self::parse(&text));
        parsed.with_context(|| {
            format!(
                "{} is no secret key of minisign without a password",
                path.display()
            )
        })
    }

    /// ```text
    /// "Ed"  password: 2  checksum: 2  salt: 32  limits: 16  id: 8  seed: 32  public key: 32  checksum: 32
    /// ```
    fn parse(text: &str) -> Result<Self> {
        let line = text.lines().nth(1).context("it has no second line")?;
        let bytes = BASE64_STANDARD.decode(line.trim())?;
        ensure!(
            bytes.len() == KEY_BYTES && bytes.starts_with(ED25519),
            "it has another form"
        );
        if bytes[2..4] != [0, 0] {
            bail!("it has a password. hint: minisign signs with it; --print-comment prints what for");
        }
        let (id, rest) = bytes[54..].split_first_chunk().context("it is too short")?;
        let pair = Ed25519KeyPair::from_seed_and_public_key(&rest[..32], &rest[32..64]);
        Ok(Self {
            id: *id,
            pair: pair.map_err(|error| anyhow::anyhow!("it is damaged: {error}"))?,
        })
    }

    /// The text of a signature's file.
    fn sign(&self, bytes: &[u8], comment: &str) -> String {
        let signature = self.pair.sign(bytes);
        let global = self.pair.sign(&[signature.as_ref(), comment.as_bytes()].concat());
        let first = BASE64_STANDARD.encode([ED25519, &self.id, signature.as_ref()].concat());
        let second = BASE64_STANDARD.encode(global);
        format!(
            "untrusted comment: signature of a checkpoint\n{first}\ntrusted comment: {comment}\n{second}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;
    use firn_image::signature::{Wanted, check};

    use std::fs;

    use super::*;

    /// Made by minisign 0.11.
    const SECRET: &str = "untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAGedkKZ9SWsjSn+V8CWy2H8i0bOUrbOoN4ZaN\
VvbPVRsSD8mw7+V4SPXfn/ktiluGomo9cuadmm3oxKkHWbzexao5s7tXLBR/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
";
    const PUBLIC: &str = "untrusted comment: minisign public key C85A529F2964E719
RWQZ52Qpn1JayPXfn/ktiluGomo9cuadmm3oxKkHWbzexao5s7tXLBR/
";

    #[test]
    fn what_is_signed_is_permitted() {
        let dir = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(false);
        let key = Key::parse(SECRET).unwrap();
        fs::write(dir.path().join("a.pub"), PUBLIC).unwrap();
        fs::write(dir.path().join(names::MANIFEST), "{}").unwrap();
        for (words, namespace, name, expected) in [
            ("", "ml", "warm", ""),
            ("", "other", "warm", "FIRN-SIGNATURE-NAMESPACE"),
            (" name=warm until=2999-12-31", "ml", "warm", ""),
            (" name=warm", "ml", "r.example/warm", "FIRN-SIGNATURE-NAME"),
            (" until=2026-11-25", "ml", "warm", "FIRN-SIGNATURE-EXPIRED"),
            (" after=2026-11-25", "ml", "warm", "FIRN-SIGNATURE-BAD"),
        ] {
            let signature = key.sign(b"{}", &format!("firn namespaces=ml{words}"));
            fs::write(dir.path().join(names::SIGNATURE), signature).unwrap();
            let wanted = Wanted {
                dir: dir.path().to_owned(),
                layer: None,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            };
            let checked = check(&wanted, dir.path(), &stop);
            let code = checked.as_ref().err().map_or("", |error| error.code());
            assert_eq!(code, expected, "{words}");
        }
    }

    #[test]
    fn keys_that_cannot_be_used_are_refused() {
        let with_password = SECRET.replace("RWQAAE", "RWRTY0");
        let damaged = SECRET.replace("CWy2", "CWy3");
        for (text, expected) in [
            (&*with_password, "has a password"),
            (&*damaged, "damaged"),
            (PUBLIC, "another form"),
            ("", "no second line"),
        ] {
            let error = Key::parse(text).err().map(|error| format!("{error:#}"));
            let error = error.unwrap_or_else(|| "no error".to_owned());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
