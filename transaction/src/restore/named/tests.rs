use std::fs;
use std::os::unix::fs::symlink;

use firn_image::form::{self, INVENTORY};
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
        Source::Store(name) => format!("{name} in the store"),
    }))
}

#[test]
fn a_name_is_for_all_containers_or_for_one() {
    assert_eq!(Wish::of(&spec(&[])), Ok(None));
    assert_eq!(name("warm-1"), Ok(Some("warm-1".into())));
    assert_eq!(name("proxy=a, server=b"), Ok(Some("b".into())));
    assert_eq!(name("proxy=a"), Ok(None));
    assert_eq!(name("server=store:a"), Ok(Some("a in the store".into())));
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
        "store:",
        "store:a/b",
        "store:..",
        "pod:a",
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

/// The image directory that is found for a pod, or the code of the refusal.
async fn image_of(config: &Config, name: &str, namespace: &str) -> Result<PathBuf, String> {
    let more = [
        ("firn.dev/restore-from", name),
        ("io.kubernetes.cri.sandbox-namespace", namespace),
    ];
    let wish = Wish::of(&spec(&more)).unwrap().unwrap();
    let node = Node {
        config,
        bundle: Path::new("/nonexistent"),
        images: &NoImages,
        reaper: &Reaper::start().unwrap(),
        cancel: &CancellationToken::default(),
    };
    let found = wish.find(node).await;
    found
        .map(|named| named.image)
        .map_err(|error| error.code().to_owned())
}

fn make_image(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join(INVENTORY), "").unwrap();
}

#[tokio::test]
async fn a_signature_permits_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("_signed/warm");
    make_image(&dir);
    let keys = root.path().join("keys");
    fs::create_dir(&keys).unwrap();
    let mut config = Config::default();
    config.restore.from_dir = Some(root.path().to_owned());
    let refused = async |config: &Config, namespace| image_of(config, "warm", namespace).await.unwrap_err();
    assert_eq!(
        refused(&config, "ml").await,
        "FIRN-RESTORE-FROM",
        "nobody is trusted"
    );
    config.restore.trusted_keys = Some(keys.clone());
    assert_eq!(refused(&config, "ml").await, "FIRN-SIGNATURE-MISSING");
    assert_eq!(
        refused(&config, "_signed").await,
        "FIRN-RESTORE-FROM",
        "no namespace"
    );
    // For all namespaces, made by minisign.
    fs::write(dir.join(names::SIGNATURE), SIGNATURE).unwrap();
    fs::write(dir.join(names::MANIFEST), "{}").unwrap();
    assert_eq!(refused(&config, "ml").await, "FIRN-SIGNATURE-KEY");
    fs::write(keys.join("a.pub"), KEY).unwrap();
    assert_eq!(refused(&config, "ml").await, "FIRN-SIGNATURE-BAD");
    fs::write(dir.join(names::MANIFEST), r#"{"format":"firn-checkpoint"}"#).unwrap();
    assert_eq!(image_of(&config, "warm", "ml").await.unwrap(), dir);
    // What the operator has put into the namespace's directory comes first, signed or not.
    let own = root.path().join("ml/warm");
    make_image(&own);
    fs::remove_dir_all(&keys).unwrap();
    assert_eq!(image_of(&config, "warm", "ml").await.unwrap(), own);
    assert_eq!(refused(&config, "other").await, "FIRN-SIGNATURE-KEY");
}

#[tokio::test]
async fn names_in_the_store_are_for_nobody_unless_the_operator_permits_them() {
    let store = tempfile::tempdir().unwrap();
    let dir = store.path().join("named/ml/warm");
    make_image(&dir);
    let mut config = Config::default();
    config.images.store = Some(store.path().to_owned());
    let refused = Err("FIRN-RESTORE-FROM".to_owned());
    assert_eq!(image_of(&config, "store:warm", "ml").await, refused);
    config.restore.from_store = true;
    assert_eq!(image_of(&config, "store:warm", "ml").await.unwrap(), dir);
    assert_eq!(image_of(&config, "store:warm", "other").await, refused);
    assert_eq!(
        image_of(&config, "warm", "ml").await,
        refused,
        "it is no directory's"
    );
    config.images.store = None;
    assert_eq!(image_of(&config, "store:warm", "ml").await, refused);
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
        Source::Directory(name) => {
            let from = config.restore.from_dir.clone();
            in_directories(name, &wish.namespace, from, false, config.restore.image_cap)
                .map(|(named, _)| named)
        }
        source => panic!("{source:?}"),
    }
}

#[test]
fn a_name_without_an_image_is_refused_and_hides_no_other() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ml/warm");
    let image = dir.join("checkpoint");
    let signed = root.path().join("_signed/warm");
    fs::create_dir_all(&signed).unwrap();
    fs::write(signed.join(INVENTORY), "").unwrap();
    let named = || in_directories("warm", "ml", Some(root.path().to_owned()), true, None);
    let expect_refused = || {
        let refused = named().unwrap_err();
        assert!(
            matches!(&refused, NameError::Unreadable { path, .. } if *path == dir),
            "{refused:?}"
        );
    };
    assert_eq!(named().unwrap().0.image, signed, "there is no other one");
    fs::create_dir_all(&dir).unwrap();
    expect_refused();
    symlink("/", &image).unwrap();
    expect_refused();
    fs::remove_file(&image).unwrap();
    fs::create_dir(&image).unwrap();
    expect_refused();
    fs::write(image.join(INVENTORY), "").unwrap();
    assert_eq!(named().unwrap().0.image, image);
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
    config.restore.image_cap = Some(7);
    assert!(matches!(refused(&config), NameError::NotAllowed { .. }));
    let dir = root.path().join("ml/warm");
    fs::create_dir(root.path().join("ml")).unwrap();
    assert_eq!(refused(&config), NameError::Absent { path: dir.clone() });
    let image = dir.join("checkpoint");
    fs::create_dir_all(&image).unwrap();
    fs::write(image.join(INVENTORY), "").unwrap();
    let named = |layer: Option<&str>| {
        Ok(Named {
            origin: String::new(),
            image: image.clone(),
            layer: layer.map(|name| dir.join(name)),
            cap: Some(7),
            chosen: Chosen::ByOperator,
        })
    };
    assert_eq!(found(&wish, &config), named(None));
    symlink("/etc/passwd", dir.join(form::LAYER)).unwrap();
    assert!(matches!(refused(&config), NameError::Unreadable { .. }), "a link");
    fs::remove_file(dir.join(form::LAYER)).unwrap();
    fs::write(dir.join(form::LAYER), "").unwrap();
    assert_eq!(found(&wish, &config), named(Some(form::LAYER)));
    fs::write(dir.join(INVENTORY), "").unwrap();
    assert!(
        matches!(refused(&config), NameError::Unreadable { .. }),
        "two images"
    );
    fs::remove_dir_all(&image).unwrap();
    let whole = Named {
        origin: String::new(),
        image: dir.clone(),
        layer: None,
        cap: Some(7),
        chosen: Chosen::ByOperator,
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
