//! Keys and signatures that minisign 0.11 has made.

use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

const MANIFEST: &str = r#"{"format":"firn-checkpoint"}"#;
const LAYER: &str = "files";
const TRUSTED: &str = "untrusted comment: minisign public key C85A529F2964E719
RWQZ52Qpn1JayPXfn/ktiluGomo9cuadmm3oxKkHWbzexao5s7tXLBR/
";
const OTHER: &str = "untrusted comment: minisign public key A20FED938EDFCE4
RWTk/O042f4gCjjB96/gPi9K3QWEjfmR904KR0sJmsU4KCucDuKyUnxu
";
/// For two namespaces, with the layer.
const FOR_TWO: &str = "untrusted comment: signature from minisign secret key
RUQZ52Qpn1JayCg/OG0iNeKlAf5jKNuEWVvoPYjHeiIzi1CfXdxIhfyxF3ljPU5k10kH0h8GdooC1Sl4QtHIRWDfoqBc7xl9QwI=
trusted comment: firn namespaces=ml,web layer=\
sha256:3d7db37d08f9140fd09f12b9621cd0954b6d56a9d2f357fb2c7f5d62636d2fd1
wEPayiIw9ef2qhJCG8opP2L3cm6YhTjDSZVwJUGB7izPIMkJkV4n9fLo9dwgmwTXSsPMKMxw22o9Vrtvq/QADA==
";
/// For all, of a file that is not hashed beforehand.
const FOR_ALL: &str = "untrusted comment: signature from minisign secret key
RWQZ52Qpn1JayLtMNU7o7CScW3NPCT1l2rp3ZS8QdwIRumJRE15rmqh9SU9908UYhrVOEVDomMlHIxAcYu22M3ytx2cMEpPTdQg=
trusted comment: firn namespaces=*
gNbnqQRz3VD46N9xwFYzV7Uq6RwCxj37WvXSS9+xVX2koS0exCh4UziAWCaI0OVRmC7DKMUsrw3f3Bnjvad2Bw==
";
/// minisign's own comment.
const PLAIN: &str = "untrusted comment: signature from minisign secret key
RUQZ52Qpn1JayCg/OG0iNeKlAf5jKNuEWVvoPYjHeiIzi1CfXdxIhfyxF3ljPU5k10kH0h8GdooC1Sl4QtHIRWDfoqBc7xl9QwI=
trusted comment: timestamp:1795644977\tfile:firn.json\thashed
o9GEuNQ4RMOqujEm96j6nySsiwtbVD3qOlW7C2Z90tKhmud5lhyyR7Q2/spEVwJ9zS2n4dcCtT5ryZtEWSgkDA==
";

/// A checkpoint, its files, and the trusted keys.
struct Scratch(TempDir);

impl Scratch {
    fn new(signature: &str) -> Self {
        let scratch = Self(tempfile::tempdir().unwrap());
        fs::create_dir(scratch.path("image")).unwrap();
        fs::create_dir(scratch.path("keys")).unwrap();
        scratch.write("image/firn.json", MANIFEST);
        scratch.write("image/firn.json.minisig", signature);
        scratch.write("layer", LAYER);
        scratch.write("keys/a.pub", OTHER);
        scratch.write("keys/b.pub", TRUSTED);
        scratch.write("keys/README", "no key");
        scratch
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn wanted(&self, has_layer: bool, namespace: &str) -> Wanted {
        Wanted {
            dir: self.path("image"),
            layer: has_layer.then(|| self.path("layer")),
            namespace: namespace.to_owned(),
            name: "warm".to_owned(),
        }
    }

    /// The code of the refusal, or nothing.
    fn check(&self, has_layer: bool, namespace: &str) -> String {
        let stop = AtomicBool::new(false);
        check(&self.wanted(has_layer, namespace), &self.path("keys"), &stop)
            .err()
            .map_or_else(String::new, |error| error.code().to_owned())
    }
}

#[test]
fn a_signature_permits_the_namespaces_that_it_names() {
    let scratch = Scratch::new(FOR_TWO);
    assert_eq!(scratch.check(true, "ml"), "");
    assert_eq!(scratch.check(true, "web"), "");
    assert_eq!(scratch.check(true, "other"), "FIRN-SIGNATURE-NAMESPACE");
    assert_eq!(Scratch::new(FOR_ALL).check(false, "other"), "");
}

#[test]
fn what_was_changed_is_refused() {
    const BAD: &str = "FIRN-SIGNATURE-BAD";
    let changed = |name: &str, text: &str| {
        let scratch = Scratch::new(FOR_TWO);
        scratch.write(name, text);
        scratch.check(true, "ml")
    };
    assert_eq!(changed("image/firn.json", r#"{"format":"firn-checkpoinu"}"#), BAD);
    assert_eq!(changed("layer", "filet"), BAD);
    let signature = |from: &str, to: &str| changed("image/firn.json.minisig", &FOR_TWO.replace(from, to));
    assert_eq!(signature("=ml,web", "=ml,other"), BAD, "the comment is signed");
    assert_eq!(signature("ml,web", "*"), BAD);
    assert_eq!(signature("RUQZ52Qpn1JayCg/", "RUQZ52Qpn1JayCg+"), BAD);
    assert_eq!(changed("image/firn.json.minisig", "nonsense"), BAD);
    assert_eq!(changed("image/firn.json.minisig", PLAIN), BAD, "another comment");
    let scratch = Scratch::new(FOR_TWO);
    assert_eq!(scratch.check(false, "ml"), BAD, "the layer is absent");
    assert_eq!(
        Scratch::new(FOR_ALL).check(true, "ml"),
        BAD,
        "the layer is not signed"
    );
    fs::remove_file(scratch.path("image/firn.json")).unwrap();
    assert_eq!(scratch.check(true, "ml"), BAD);
}

#[test]
fn who_is_not_trusted_permits_nothing() {
    let scratch = Scratch::new(FOR_TWO);
    fs::remove_file(scratch.path("keys/b.pub")).unwrap();
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-KEY", "an unknown key");
    // The id of the trusted key, with the key of somebody else.
    let mixed = TRUSTED.replace("yPXfn/", "yDjB96");
    scratch.write("keys/b.pub", &mixed);
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-BAD");
    scratch.write("keys/b.pub", "nonsense");
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-KEY", "no key");
    fs::remove_dir_all(scratch.path("keys")).unwrap();
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-KEY", "no keys");
}

#[test]
fn a_checkpoint_that_is_not_signed_is_refused() {
    let scratch = Scratch::new(FOR_TWO);
    let path = scratch.path("image/firn.json.minisig");
    fs::remove_file(&path).unwrap();
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-MISSING");
    scratch.write("elsewhere", FOR_TWO);
    symlink(scratch.path("elsewhere"), &path).unwrap();
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-BAD", "a link");
    fs::remove_file(&path).unwrap();
    scratch.write("image/firn.json.minisig", &" ".repeat(100_000));
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-BAD", "too long");
}

#[test]
fn what_was_revoked_is_permitted_by_no_signature() {
    let scratch = Scratch::new(FOR_TWO);
    let sum = firn_store::block_hash::hex(&Sha256::digest(MANIFEST));
    let other = "0".repeat(64);
    for (list, expected) in [
        (String::new(), ""),
        (format!("# lost\n\n{other}  other/firn.json\n"), ""),
        (format!("# {sum}\n"), ""),
        (
            format!("{other}\n{sum}  warm/firn.json\n"),
            "FIRN-SIGNATURE-REVOKED",
        ),
        (format!("  {}", sum.to_uppercase()), "FIRN-SIGNATURE-REVOKED"),
        (format!("sha256:{other}\n"), "FIRN-SIGNATURE-KEY"),
        (format!("{other}\n{}\n", &sum[1..]), "FIRN-SIGNATURE-KEY"),
    ] {
        scratch.write("keys/revoked", &list);
        assert_eq!(scratch.check(true, "ml"), expected, "{list}");
    }
    fs::write(scratch.path("keys/revoked"), b"\xff").unwrap();
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-KEY", "no text");
    fs::remove_file(scratch.path("keys/revoked")).unwrap();
    symlink("absent", scratch.path("keys/revoked")).unwrap();
    assert_eq!(scratch.check(true, "ml"), "FIRN-SIGNATURE-KEY", "a link");
}

#[test]
fn a_check_that_is_stopped_permits_nothing() {
    let scratch = Scratch::new(FOR_TWO);
    let stop = AtomicBool::new(true);
    let checked = check(&scratch.wanted(true, "ml"), &scratch.path("keys"), &stop);
    assert!(
        matches!(checked, Err(SignatureError::Unreadable { .. })),
        "{checked:?}"
    );
}
