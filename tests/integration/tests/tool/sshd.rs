//! `firn move` over ssh and sshd of Debian, between two nodes that are joined by a link.

use anyhow::{Result, ensure};
use firn_lab::{GpuHost, failure, on};
use firn_node::{Node, Platform, link, wait_for};

use super::moves::{knows_nothing, pair};
use super::{LIMIT, copy, counter, nothing_left};

/// What an unpacked package has not made.
const SET_UP: &str = "mkdir -p /run/sshd /root/.ssh; chmod 700 /root/.ssh
    getent passwd sshd >/dev/null ||
        useradd --system --home-dir /run/sshd --no-create-home --shell /usr/sbin/nologin sshd
    printf '%s\\n' 'HostKey /etc/ssh/key' 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' \
        'UsePAM no' 'PidFile /run/sshd.pid' >/etc/ssh/sshd_config";

/// Starts sshd with a new key in the place of the one that runs.
const SERVE: &str = "if [ -e /run/sshd.pid ]; then kill $(cat /run/sshd.pid); fi
    while [ -e /run/sshd.pid ]; do sleep 0.05; done
    rm -f /etc/ssh/key*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/key; /usr/sbin/sshd";

fn serve(node: &Node) -> Result<()> {
    node.run(&["sh", "-euc", SERVE])?;
    wait_for("sshd", LIMIT, || {
        Ok(node.path("/run/sshd.pid").exists().then_some(()))
    })
}

/// The second node lets the first one's root in. Returns how ssh names it.
fn join(a: &GpuHost, b: &GpuHost) -> Result<String> {
    let (from, to) = (a.node(), b.node());
    from.unpack(&["openssh-client"])?;
    to.unpack(&["openssh-server"])?;
    link(from, to)?;
    to.run(&["sh", "-euc", SET_UP])?;
    serve(to)?;
    let make =
        "mkdir -p /root/.ssh; chmod 700 /root/.ssh; ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519";
    from.run(&["sh", "-euc", make])?;
    let key = from.read("/root/.ssh/id_ed25519.pub")?;
    to.write("/root/.ssh/authorized_keys", key)?;
    Ok(format!("root@{}", to.name()))
}

/// The first node knows the key that the second one has now.
fn trust(a: &GpuHost, b: &GpuHost) -> Result<()> {
    let key = b.node().read("/etc/ssh/key.pub")?;
    let known = format!("{} {key}", b.node().name());
    a.node().write("/root/.ssh/known_hosts", known)
}

pub fn a_container_moves_over_ssh(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-ssh")?, |[a, b]| {
        let target = join(a, b)?;
        let job = counter(a)?;
        let refused = |words: &[&str]| -> Result<()> {
            let output = failure(a.node().run(&["firn", "move", "job", &target]))?;
            for word in words {
                ensure!(output.contains(word), "no {word:?} in {output}");
            }
            ensure!(output.contains("FIRN-MOVE-SSH: ") && output.matches("hint: ").count() == 1);
            job.goes_on(3)?;
            knows_nothing(b)
        };
        // Nobody answers a question: an unknown key is refused as a wrong one.
        refused(&["Host key verification failed", "another host key"])?;
        trust(a, b)?;
        let program = "/usr/local/bin/firn";
        b.node().run(&["mv", program, "/srv/firn"])?;
        refused(&["firn: the program cannot be started there"])?;
        b.node().run(&["mv", "/srv/firn", program])?;
        serve(b.node())?;
        refused(&["IDENTIFICATION HAS CHANGED", "another host key"])?;
        trust(a, b)?;
        let checked = a.firn(&["move", "job", &target, "--dry-run"])?;
        ensure!(
            checked["dry_run"] == true && job.status()? == "RUNNING",
            "{checked}"
        );
        let before = job.goes_on(3)?;
        let done = a.firn(&["move", "job", &target, "--gpus", "1"])?;
        ensure!(
            done["to"] == *target && done["bytes"].as_u64() > Some(8 << 20),
            "{done}"
        );
        knows_nothing(a)?;
        let copied = copy(b, "job", &b.uuids()[1..])?;
        ensure!(
            copied.lines()?.reached(1) > before.reached(1),
            "it was started afresh"
        );
        copied.remove()?;
        nothing_left(b)?;
        [a, b].iter().try_for_each(|host| host.idle())
    })
}
