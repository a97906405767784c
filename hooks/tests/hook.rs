//! Runs the hook as runc does. Needs root for network namespaces.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};

fn hook(argument: &str, state: &str) -> Output {
    hook_with(argument, &[], state)
}

fn hook_with(argument: &str, options: &[&str], state: &str) -> Output {
    run(
        env!("CARGO_BIN_EXE_firn-hook"),
        &[&[argument], options].concat(),
        state,
    )
}

fn run(program: &str, arguments: &[&str], state: &str) -> Output {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // The hook may end without reading its input.
    let _ = child
        .stdin
        .take()
        .expect("stdin is piped")
        .write_all(state.as_bytes());
    child.wait_with_output().expect("the hook ends")
}

#[test]
fn its_version_is_that_of_the_release() {
    let output = hook("--version", "");
    assert!(output.status.success());
    let expected = concat!("firn-hook ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

#[test]
fn what_others_have_written_does_nothing_to_a_terminal() {
    let bundle = tempfile::tempdir().expect("a directory");
    let root = bundle.path().join("x\u{1b}[2J\n\u{202e}");
    let spec = serde_json::json!({"root": {"path": root}});
    std::fs::write(bundle.path().join("config.json"), spec.to_string()).expect("written");
    let state = serde_json::json!({"bundle": bundle.path()}).to_string();
    {
        let output = hook("update-ldcache", &state);
        assert_eq!(output.status.code(), Some(1));
        let message = String::from_utf8(output.stderr).expect("text");
        assert!(message.contains(r"x\u{1b}[2J\n\u{202e}"), "{message}");
        assert!(
            message
                .trim_end()
                .chars()
                .all(|c| !c.is_control() && c != '\u{202e}'),
            "{message:?}"
        );
    }
}

/// Every path of an image by which a hook might be made to open a device, to wait, or to leave the image.
#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn nothing_is_opened_in_the_place_of_the_cache_but_a_regular_file() {
    let bundle = tempfile::tempdir().expect("a directory");
    let hosts = tempfile::tempdir().expect("a directory");
    let at = |path: &str| bundle.path().join("rootfs").join(path);
    let spec = serde_json::json!({"root": {"path": "rootfs"}});
    std::fs::write(bundle.path().join("config.json"), spec.to_string()).expect("written");
    let state = serde_json::json!({"bundle": bundle.path()}).to_string();
    let shell = |script: &str| {
        let script = format!("rm -rf rootfs && mkdir -p rootfs/etc && cd rootfs && {script}");
        let done = Command::new("sh")
            .args(["-ec", &script])
            .current_dir(bundle.path())
            .status();
        assert!(done.expect("sh starts").success(), "{script}: needs root");
    };
    // No driver has this number: opening the node fails with ENXIO. Nobody writes into the fifo.
    for script in [
        "mknod etc/ld.so.cache c 60 250",
        "mkfifo etc/ld.so.cache",
        "mkdir etc/ld.so.cache",
        "ln -s /dev/watchdog etc/ld.so.cache",
        "mknod node c 60 250 && ln -s ../node etc/ld.so.cache",
        "rmdir etc && mkdir usr && ln -s usr etc && mkfifo usr/ld.so.cache",
    ] {
        shell(script);
        let output = hook("update-ldcache", &state);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{script}: {message}");
        assert!(
            message.contains("/etc/ld.so.cache: not a regular file"),
            "{script}: {message}"
        );
    }
    // A link that leads out of the image leads nowhere.
    std::fs::write(hosts.path().join("ld.so.cache"), "the host's").expect("written");
    shell(&format!("rmdir etc && ln -s {} etc", hosts.path().display()));
    assert_eq!(
        hook_with("update-ldcache", &["--library", "/lib/x.so"], &state)
            .status
            .code(),
        Some(1)
    );
    // A directory of the host that is mounted there is not looked at.
    shell("true");
    let script = format!(
        "mount --bind {} {} && exec {} update-ldcache --library /lib/x.so",
        hosts.path().display(),
        at("etc").display(),
        env!("CARGO_BIN_EXE_firn-hook")
    );
    let output = run(
        "unshare",
        &["--mount", "--propagation", "private", "sh", "-ec", &script],
        &state,
    );
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && message.contains("what is mounted is not changed"),
        "{message}"
    );
    let left = std::fs::read(hosts.path().join("ld.so.cache")).expect("read");
    assert_eq!(
        (
            left.as_slice(),
            std::fs::read_dir(hosts.path()).expect("listed").count()
        ),
        (&b"the host's"[..], 1)
    );
}

/// Whether a process of this namespace can talk to another by TCP.
fn loopback_works() -> bool {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    listener
        .and_then(|listener| TcpStream::connect(listener.local_addr()?))
        .is_ok()
}

/// Runs `check` on a thread with a network namespace of its own, as the pid of a container.
fn in_a_new_namespace(check: fn(pid: String)) {
    let thread = std::thread::spawn(move || match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => check(nix::unistd::gettid().to_string()),
        Err(Errno::EPERM) => panic!("a new network namespace needs root"),
        Err(e) => panic!("unshare: {e}"),
    });
    thread.join().expect("the check passed");
}

#[test]
fn the_loopback_of_the_container_comes_up_and_repeating_it_does_no_harm() {
    in_a_new_namespace(|pid| {
        assert!(!loopback_works(), "a new namespace has its loopback down");
        // The hook's own namespace is the one it was started in, as runc starts it in its own: enter it from
        // there.
        for _ in 0..2 {
            let state =
                format!(r#"{{"ociVersion":"1.2.0","id":"c","status":"stopped","pid":{pid},"bundle":"/b"}}"#);
            let output = std::thread::scope(|scope| {
                scope
                    .spawn(|| outside(|| hook("createRuntime", &state)))
                    .join()
                    .unwrap()
            });
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(loopback_works());
        }
    });
}

/// Runs on this thread after moving it into the network namespace of the test program.
fn outside<T>(run: impl FnOnce() -> T) -> T {
    let home = std::fs::File::open(format!("/proc/{}/ns/net", std::process::id()));
    nix::sched::setns(home.expect("/proc is there"), CloneFlags::CLONE_NEWNET).expect("root may enter");
    run()
}

#[test]
fn a_container_in_the_hosts_namespace_is_left_alone() {
    in_a_new_namespace(|pid| {
        // Started from within: to the hook this is the runtime's own namespace.
        let output = hook("createRuntime", &format!(r#"{{"pid":{pid}}}"#));
        assert!(output.status.success());
        assert!(!loopback_works(), "the hook changed the runtime's own namespace");
    });
}

#[test]
fn failures_and_wrong_usage_have_different_codes() {
    let output = hook("createRuntime", r#"{"pid":2147483646}"#);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/proc/2147483646/ns/net"));
    assert_eq!(hook("createRuntime", "{}").status.code(), Some(1));
    let output = hook("poststop", "{}");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--help"));
    let output = hook("--help", "");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("exit status"));
}

/// What is shipped for podman and CRI-O names calls that the hook knows.
#[test]
fn the_shipped_hooks_files_call_the_hook_as_it_wants_to_be_called() {
    let bundle = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(bundle.path().join("root")).expect("made");
    std::fs::write(bundle.path().join("config.json"), r#"{"root": {"path": "root"}}"#).expect("written");
    let own = serde_json::json!({
        "ociVersion": "1.2.0", "id": "c", "pid": std::process::id(), "bundle": bundle.path(),
    });
    for (text, stage) in [
        (include_str!("../../config/hooks.d/50-firn.json"), "createRuntime"),
        (
            include_str!("../../config/hooks.d/51-firn-libraries.json"),
            "createContainer",
        ),
    ] {
        let file: serde_json::Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(file["version"], "1.0.0");
        assert_eq!(file["when"], serde_json::json!({"always": true}));
        assert_eq!(file["stages"], serde_json::json!([stage]));
        assert_eq!(file["hook"]["args"], serde_json::json!(["firn-hook", stage]));
        let done = hook(stage, &own.to_string());
        assert!(done.status.success(), "{done:?}");
    }
}

/// As CRIU calls it: by a link, without arguments.
#[test]
fn as_a_script_it_acts_at_its_moments_and_leaves_its_reason() {
    let bundle = tempfile::tempdir().expect("a directory");
    let link = bundle.path().join("firn-criu-script");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_firn-hook"), &link).expect("linked");
    let call = |action: &str| {
        Command::new(&link)
            .env("CRTOOLS_SCRIPT_ACTION", action)
            .env("CRTOOLS_INIT_PID", std::process::id().to_string())
            .output()
            .expect("the hook starts")
    };
    for action in ["pre-restore", "post-resume", "pre-dump"] {
        assert!(call(action).status.success(), "{action}");
    }
    let failed = call("post-setup-namespaces");
    assert_eq!(failed.status.code(), Some(1));
    let left = std::fs::read(bundle.path().join("firn-criu-script.json")).expect("a reason");
    let left: serde_json::Value = serde_json::from_slice(&left).expect("JSON");
    assert_eq!(left["code"], "FIRN-SPEC-UNREADABLE");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("FIRN-SPEC-UNREADABLE: "));
    std::fs::write(bundle.path().join("config.json"), "{}").expect("written");
    assert!(call("post-setup-namespaces").status.success());
    assert!(call("post-restore").status.success());
    assert_eq!(hook("", "{}").status.code(), Some(2), "it is no script then");
}

/// A container that has the host's /etc mounted, in a mount namespace as at the stage createContainer. Gives
/// the hook's output.
fn with_etc_mounted(bundle: &Path, options: &str) -> Output {
    let at = |path: &str| bundle.join(path);
    for dir in ["root/etc", "root/usr/lib64", "host/etc", "driver"] {
        std::fs::create_dir_all(at(dir)).expect("made");
    }
    let maps = std::fs::read_to_string("/proc/self/maps").expect("read");
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let libc = paths.find(|path| path.contains("/libc.so")).expect("a C library");
    std::fs::copy(libc, at("driver/libcuda.so.580.1")).expect("copied");
    let spec = serde_json::json!({
        "root": {"path": "root"},
        "mounts": [
            {"source": at("driver/libcuda.so.580.1"), "destination": "/usr/lib64/libcuda.so.580.1"},
            {"source": at("host/etc"), "destination": "/etc"},
        ],
        "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]},
    });
    std::fs::write(at("config.json"), spec.to_string()).expect("written");
    let state = serde_json::json!({"bundle": bundle}).to_string();
    let script = format!(
        "mount --bind host/etc root/etc && mount -o remount,bind,{options} root/etc && echo '{state}' \
         | {} createContainer",
        env!("CARGO_BIN_EXE_firn-hook")
    );
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .current_dir(bundle)
        .output()
        .expect("a mount namespace")
}

#[test]
fn nothing_is_written_through_a_mount_and_the_container_starts() {
    for options in ["rw", "ro"] {
        let bundle = tempfile::tempdir().expect("a directory");
        let output = with_etc_mounted(bundle.path(), options);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options}: {message}");
        let hosts = std::fs::read_dir(bundle.path().join("host/etc")).expect("read");
        assert_eq!(hosts.count(), 0, "{options}: the host's files are as they were");
        assert!(message.contains("/etc/ld.so.cache"), "{options}: {message}");
        let link = bundle.path().join("root/usr/lib64/libc.so.6");
        assert_eq!(
            std::fs::read_link(link).expect("a link"),
            Path::new("libcuda.so.580.1")
        );
    }
}

#[test]
fn no_failure_keeps_a_container_from_starting() {
    let bundle = tempfile::tempdir().expect("a directory");
    let state = serde_json::json!({"bundle": bundle.path()}).to_string();
    for (spec, reports) in [
        ("no JSON", true),
        (r#"{"linux": {"devices": [{"path": "/dev/fuse"}]}}"#, false),
        (r#"{"linux": {"devices": [{"path": "/dev/nvidia0"}]}}"#, true),
        (
            r#"{"root": {"path": "none"}, "linux": {"devices": [{"path": "/dev/nvidia0"}]}}"#,
            true,
        ),
    ] {
        std::fs::write(bundle.path().join("config.json"), spec).expect("written");
        let output = hook("createContainer", &state);
        assert!(output.status.success(), "{spec}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(message.starts_with("firn-hook: "), reports, "{spec}: {message}");
    }
    assert!(hook("createContainer", "{}").status.success());
}
