//! What must hold for options, whatever their bytes are.

use firn_containerd::Message as _;
use firn_containerd::runc::{self, RuntimeOptions};
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;

use super::{
    CHECKPOINT_OPTIONS, OPTIONS, RUNTIME_OPTIONS, checkpoint_options, from_toml, is_sent_as, runc_options,
    type_name,
};
use firn_transaction::options::RuncOptions;

/// Options as a client sends them (an `Any`, or the value of one), as TOML, and as they lie in a bundle.
pub fn options(bytes: &[u8]) {
    if let Ok(any) = Any::parse_from_bytes(bytes) {
        expect_sent(&any);
    }
    for name in [
        OPTIONS,
        RUNTIME_OPTIONS,
        CHECKPOINT_OPTIONS,
        "containerd.runc.v2.Options",
    ] {
        expect_sent(&Any {
            type_url: format!("types.googleapis.com/{name}"),
            value: bytes.to_vec(),
            ..Any::default()
        });
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(options) = from_toml(text)
    {
        is_kept(&options);
    }
    if let Ok(options) = serde_json::from_slice(bytes) {
        is_kept(&options);
    }
}

fn expect_sent(any: &Any) {
    if names_a_file(any) {
        return;
    }
    let runc = runc_options(Some(any));
    let checkpoint = checkpoint_options(Some(any));
    if !any.type_url.is_empty() || !any.value.is_empty() {
        assert!(runc.is_err() || is_sent_as(any), "{} was taken", any.type_url);
        assert!(checkpoint.is_err() || type_name(any) == CHECKPOINT_OPTIONS);
    }
    if let Ok(options) = runc {
        is_kept(&options);
    }
}

/// Whether the options stand in a file of the host, which no input may have the test open.
pub(crate) fn names_a_file(any: &Any) -> bool {
    type_name(any) == RUNTIME_OPTIONS
        && RuntimeOptions::decode(&*any.value).is_ok_and(|options| !options.config_path.is_empty())
}

/// What is written for `delete` is read as it was, and has the same meaning when it is sent again.
pub(crate) fn is_kept(options: &RuncOptions) {
    let json = options.json().to_string();
    assert_eq!(
        serde_json::from_str::<RuncOptions>(&json).ok().as_ref(),
        Some(options)
    );
    assert_eq!(json == "{}", *options == RuncOptions::default());
    assert!(!options.runtime().is_empty());
    assert!(options.root("ns").ends_with("ns"));

    let message = runc::Options {
        criu_path: options.criu_path.clone(),
        no_pivot_root: options.no_pivot_root,
        no_new_keyring: options.no_new_keyring,
        shim_cgroup: options.shim_cgroup.clone(),
        io_uid: options.io_uid,
        io_gid: options.io_gid,
        binary_name: options.binary_name.clone(),
        root: options.root.clone(),
        systemd_cgroup: options.systemd_cgroup,
        criu_image_path: options.criu_image_path.clone(),
        criu_work_path: options.criu_work_path.clone(),
        task_api_address: options.task_api_address.clone(),
        task_api_version: options.task_api_version,
        restore_dir: String::new(),
    };
    let any = Any {
        type_url: OPTIONS.to_owned(),
        value: message.encode_to_vec(),
        ..Any::default()
    };
    let again = runc_options(Some(&any)).expect("it is of the right type");
    assert_eq!(again, *options);
}
