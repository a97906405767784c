//! What failures leave, and its removal.

use anyhow::{Result, ensure};
use firn_lab::{BUNDLES, Container, GpuHost, on};
use firn_node::{Platform, wait_for};

use super::{LIMIT, Line, doctor, host};

const fn left(found: &'static str) -> Line {
    Line {
        name: "leftovers",
        status: "warn",
        found,
        remedy: "`firn doctor --fix`",
    }
}

/// What is left, by a script, and what shows that it is gone.
const LEFT: &[(Line, &str, &str)] = &[
    (
        left("/srv/work/.criu.cgyard.x is mounted"),
        "mkdir -p /srv/work/.criu.cgyard.x; mount -t tmpfs yard /srv/work/.criu.cgyard.x",
        "[ ! -e /srv/work/.criu.cgyard.x ]",
    ),
    (
        left("/tmp/.criu.mntns.abcdef is empty"),
        "mkdir /tmp/.criu.mntns.abcdef",
        "[ ! -e /tmp/.criu.mntns.abcdef ]",
    ),
    (
        left("/var/lib/firn/restore/job-2147483646 is of a `firn` that was killed"),
        "cd /var/lib; mkdir -p firn/restore/job-2147483646; echo x >firn/restore/job-2147483646/pages-1.img",
        "[ ! -e /var/lib/firn/restore/job-2147483646 ]",
    ),
    (
        left("/run/containerd/s/dead is the socket of a shim that has ended"),
        "mkdir -p /run/containerd/s; perl -MIO::Socket::UNIX -e \
         'IO::Socket::UNIX->new(Local => \"/run/containerd/s/dead\", Listen => 1) or die'; \
         touch -d '10 minutes ago' /run/containerd/s/dead",
        "[ ! -e /run/containerd/s/dead ]",
    ),
    (
        left("firn-runc was killed in a transaction of ghost"),
        "mkdir -p /run/firn/runc/run/runc /run/ghost; printf /run/ghost >/run/firn/runc/run/runc/ghost",
        "[ ! -e /run/firn/runc/run/runc/ghost ]",
    ),
];

fn run(host: &GpuHost, script: &str) -> Result<()> {
    host.node().run(&["sh", "-c", script]).map(drop)
}

/// Names it, and removes it.
fn is_fixed(host: &GpuHost, line: &Line) -> Result<()> {
    line.expect(&doctor(host, "")?)?;
    let fixed = doctor(host, "--fix")?;
    let is_fixed = fixed.iter().any(|check| {
        let found = check["found"].as_str().unwrap_or_default();
        check["status"] == "ok" && found.contains(line.found) && found.ends_with(": fixed")
    });
    ensure!(is_fixed, "{line:?}: {fixed:#?}");
    let after = doctor(host, "")?;
    ensure!(!line.is_among(&after), "{line:?} is still there");
    Ok(())
}

/// A container that its client has paused loses containerd and its shim.
fn frozen(host: &GpuHost) -> Result<()> {
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(1)?;
    let pid = job.pid()?.to_string();
    job.task(&["pause"])?;
    let none = doctor(host, "--fix")?;
    ensure!(
        none.iter()
            .any(|check| check["name"] == "leftovers" && check["found"] == "none"),
        "a paused container is no leftover: {none:#?}"
    );
    host.node().kill_containerd()?;
    host.kill_shim("job")?;
    is_fixed(host, &left("default/job is frozen"))?;
    ensure!(
        host.node().run(&["test", "-d", &format!("/proc/{pid}")]).is_err(),
        "it lives"
    );
    host.node().start_containerd()?;
    job.forget()
}

/// A checkpoint loses containerd and its shim while the driver works.
fn journal(host: &GpuHost) -> Result<()> {
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(1)?;
    host.fault(&["--call", "lock", "--hang"])?;
    let mut client = job.begin_checkpoint("checkpoint/job")?;
    in_lock(host)?;
    host.node().kill_containerd()?;
    host.kill_shim("job")?;
    let _ended = client.wait()?;
    is_fixed(
        host,
        &left("checkpoint of default/job ended in gpu-lock with its shim"),
    )?;
    host.no_faults()?;
    host.node().start_containerd()?;
    job.forget()
}

fn in_lock(host: &GpuHost) -> Result<()> {
    wait_for("the driver's lock", LIMIT, || {
        let journal = host.node().read(format!("{BUNDLES}/job/firn-journal"));
        Ok(journal.is_ok_and(|text| text.contains("gpu-lock")).then_some(()))
    })
}

pub fn what_failures_leave_is_named_and_removed(platform: Platform) -> Result<()> {
    on([host(platform, "dr-l")?], |[host]| {
        for (line, leaves, gone) in LEFT {
            run(host, leaves)?;
            is_fixed(host, line)?;
            run(host, gone)?;
        }
        frozen(host)?;
        journal(host)?;
        host.idle()
    })
}

pub fn what_a_living_transaction_uses_stays(platform: Platform) -> Result<()> {
    on([host(platform, "dr-t")?], |[host]| {
        host.configure("[deadlines]\ngpu-lock = \"20s\"\n")?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(1)?;
        host.fault(&["--call", "lock", "--hang"])?;
        let mut client = job.begin_checkpoint("checkpoint/job")?;
        in_lock(host)?;
        let checks = doctor(host, "--fix")?;
        let none = checks
            .iter()
            .any(|check| check["name"] == "leftovers" && check["found"] == "none");
        ensure!(none, "{checks:#?}");
        in_lock(host)?;
        host.no_faults()?;
        ensure!(!client.wait()?.success(), "a lock that hangs has succeeded");
        job.goes_on(2)?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        host.remove_image("checkpoint/job")?;
        host.idle()
    })
}
