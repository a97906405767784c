use std::fs;
use std::os::unix::fs::symlink;
use std::pin::Pin;

use serde_json::{Value, json};

use super::*;

fn spec(more: &[(&str, &str)]) -> Spec {
    let mut annotations = json!({
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "server",
        "io.kubernetes.cri.sandbox-namespace": "ml",
    });
    for (key, value) in more {
        annotations[*key] = Value::from(*value);
    }
    Spec::from(json!({ "annotations": annotations }))
}

fn name(value: &str) -> Result<Option<String>, NameError> {
    let wish = Wish::of(&spec(&[("firn.dev/restore-from", value)]))?;
    Ok(wish.map(|wish| match wish.source {
        Source::Directory(name) => name,
        Source::Image(image) => format!("image {image}"),
    }))
}

#[test]
fn a_name_is_for_all_containers_or_for_one() {
    assert_eq!(Wish::of(&spec(&[])), Ok(None));
    assert_eq!(name("warm-1"), Ok(Some("warm-1".into())));
    assert_eq!(name("proxy=a, server=b"), Ok(Some("b".into())));
    assert_eq!(name("proxy=a"), Ok(None));
    let image = "r.example:5000/a/b:1@sha256:0123";
    let expected = Ok(Some(format!("image {image}")));
    assert_eq!(name(&format!("image:{image}")), expected);
    assert_eq!(name(&format!("proxy=a,server=image:{image}")), expected);
    let value = format!("server=image:{image},proxy=a");
    assert_eq!(name_for(&value, "server"), Ok(None), "it is no directory");
    assert_eq!(name_for(&value, "proxy"), Ok(Some("a".to_owned())));
    for wrong in [
        "",
        "..",
        "a/b",
        "../a",
        "a,b",
        "server=",
        "=a",
        "server=a,server=b",
        ".hidden",
        "a b",
        "image:",
        "image:/etc/passwd",
        "image:a b",
        "image:a,b",
        "other:a",
    ] {
        let error = name(wrong).unwrap_err();
        assert!(matches!(error, NameError::Value { .. }), "{wrong}: {error}");
    }
    let sandbox = [
        ("firn.dev/restore-from", "a"),
        ("io.kubernetes.cri.container-type", "sandbox"),
    ];
    assert_eq!(Wish::of(&spec(&sandbox)), Ok(None));
    assert_eq!(
        Wish::of(&Spec::from(
            json!({"annotations": {"firn.dev/restore-from": "a"}})
        )),
        Ok(None),
        "no pod's"
    );
}

#[test]
fn restarts_are_restored_again_unless_they_are_to_start_cold() {
    let restored = |more: &[(&str, &str)]| {
        let all = [
            &[
                ("firn.dev/restore-from", "a"),
                ("io.kubernetes.container.restartCount", "2"),
            ],
            more,
        ];
        Wish::of(&spec(&all.concat())).map(|wish| wish.is_some())
    };
    assert_eq!(restored(&[]), Ok(true));
    assert_eq!(restored(&[("firn.dev/restore-restarts", "cold")]), Ok(false));
    assert_eq!(restored(&[("firn.dev/restore-fallback", "cold")]), Ok(false));
    let again = [
        ("firn.dev/restore-fallback", "cold"),
        ("firn.dev/restore-restarts", "again"),
    ];
    assert_eq!(restored(&again), Ok(true));
    assert_eq!(
        restored(&[
            ("firn.dev/restore-restarts", "cold"),
            ("io.kubernetes.container.restartCount", "0")
        ]),
        Ok(true)
    );
    assert!(restored(&[("firn.dev/restore-fallback", "warm")]).is_err());
}

#[tokio::test]
async fn signed_checkpoints_are_for_the_namespaces_that_they_name() {
    struct None;
    impl ImageStore for None {
        fn find(&self, _: &str) -> Pin<Box<dyn Future<Output = Result<FoundImage, String>> + Send + '_>> {
            panic!("no image is named")
        }
    }
    let root = tempfile::tempdir().unwrap();
    let (reaper, cancel) = (Reaper::start().unwrap(), CancellationToken::default());
    let dir = root.path().join("_signed/warm");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join(INVENTORY), "").unwrap();
    let keys = root.path().join("keys");
    fs::create_dir(&keys).unwrap();
    let mut config = Config::default();
    config.restore.from_dir = Some(root.path().to_owned());
    let code = async |config: &Config, namespace: &str| {
        let more = [
            ("firn.dev/restore-from", "warm"),
            ("io.kubernetes.cri.sandbox-namespace", namespace),
        ];
        let wish = Wish::of(&spec(&more)).unwrap().unwrap();
        let node = Node {
            config,
            bundle: root.path(),
            images: &None,
            reaper: &reaper,
            cancel: &cancel,
        };
        let refused = wish.find(node).await.err();
        refused.map_or_else(String::new, |error| error.code().to_owned())
    };
    assert_eq!(
        code(&config, "ml").await,
        "FIRN-RESTORE-FROM",
        "nobody is trusted"
    );
    config.restore.trusted_keys = Some(keys.clone());
    assert_eq!(code(&config, "ml").await, "FIRN-SIGNATURE-MISSING");
    assert_eq!(
        code(&config, "_signed").await,
        "FIRN-RESTORE-FROM",
        "no namespace"
    );
    // For all namespaces, made by minisign.
    fs::write(dir.join(names::SIGNATURE), SIGNATURE).unwrap();
    fs::write(dir.join(names::MANIFEST), "{}").unwrap();
    assert_eq!(code(&config, "ml").await, "FIRN-SIGNATURE-KEY");
    fs::write(keys.join("a.pub"), KEY).unwrap();
    assert_eq!(code(&config, "ml").await, "FIRN-SIGNATURE-BAD");
    fs::write(dir.join(names::MANIFEST), r#"{"format":"firn-checkpoint"}"#).unwrap();
    assert_eq!(code(&config, "ml").await, "");
    // What the operator has put into the namespace's directory comes first, signed or not.
    let own = root.path().join("ml/warm");
    fs::create_dir_all(&own).unwrap();
    fs::write(own.join(INVENTORY), "").unwrap();
    fs::remove_dir_all(&keys).unwrap();
    assert_eq!(code(&config, "ml").await, "");
    assert_eq!(code(&config, "other").await, "FIRN-SIGNATURE-KEY");
}

const KEY: &str = "untrusted comment: minisign public key C85A529F2964E719
RWQZ52Qpn1JayPXfn/ktiluGomo9cuadmm3oxKkHWbzexao5s7tXLBR/
";
const SIGNATURE: &str = "untrusted comment: signature from minisign secret key
RWQZ52Qpn1JayLtMNU7o7CScW3NPCT1l2rp3ZS8QdwIRumJRE15rmqh9SU9908UYhrVOEVDomMlHIxAcYu22M3ytx2cMEpPTdQg=
trusted comment: firn namespaces=*
gNbnqQRz3VD46N9xwFYzV7Uq6RwCxj37WvXSS9+xVX2koS0exCh4UziAWCaI0OVRmC7DKMUsrw3f3Bnjvad2Bw==
";

fn found(wish: &Wish, config: &Config) -> Result<Named, NameError> {
    match &wish.source {
        Source::Directory(name) => in_directories(name, &wish.namespace, config).map(|(named, _)| named),
        source => panic!("{source:?}"),
    }
}

#[test]
fn the_operator_allows_namespaces_by_directories() {
    let root = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    let wish = Wish::of(&spec(&[("firn.dev/restore-from", "warm")]))
        .unwrap()
        .unwrap();
    let refused = |config: &Config| found(&wish, config).unwrap_err();
    assert!(matches!(refused(&config), NameError::NotAllowed { .. }));
    config.restore.from_dir = Some(root.path().to_owned());
    assert!(matches!(refused(&config), NameError::NotAllowed { .. }));
    let dir = root.path().join("ml/warm");
    fs::create_dir(root.path().join("ml")).unwrap();
    assert_eq!(refused(&config), NameError::Absent { path: dir.clone() });
    fs::create_dir(&dir).unwrap();
    let image = dir.join("checkpoint");
    symlink("/", &image).unwrap();
    assert_eq!(
        refused(&config),
        NameError::Absent { path: dir.clone() },
        "a link"
    );
    fs::remove_file(&image).unwrap();
    fs::create_dir(&image).unwrap();
    let named = |layer: Option<&str>| {
        Ok(Named {
            origin: String::new(),
            image: image.clone(),
            layer: layer.map(|name| dir.join(name)),
        })
    };
    assert_eq!(found(&wish, &config), named(None));
    symlink("/etc/passwd", dir.join(names::ARCHIVE_LAYER)).unwrap();
    assert!(matches!(refused(&config), NameError::Unreadable { .. }), "a link");
    fs::remove_file(dir.join(names::ARCHIVE_LAYER)).unwrap();
    fs::write(dir.join(names::ARCHIVE_LAYER), "").unwrap();
    assert_eq!(found(&wish, &config), named(Some(names::ARCHIVE_LAYER)));
    fs::write(dir.join(INVENTORY), "").unwrap();
    let whole = Named {
        origin: String::new(),
        image: dir.clone(),
        layer: None,
    };
    assert_eq!(found(&wish, &config), Ok(whole));
    // Another namespace's pod names nothing of this one.
    let other = [
        ("firn.dev/restore-from", "warm"),
        ("io.kubernetes.cri.sandbox-namespace", "other"),
    ];
    let other = Wish::of(&spec(&other)).unwrap().unwrap();
    let other = found(&other, &config);
    assert!(matches!(other, Err(NameError::NotAllowed { .. })), "{other:?}");
}
