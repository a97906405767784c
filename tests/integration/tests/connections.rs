//! TCP connections of a job: refused and named, or closed or continued in the copy, while the source keeps
//! them.
//!
//! The job has a server, and a client of its own; a program of the node is another client. With the node's
//! network the connection of the latter leads outside, and the addresses are there on every node.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    COUNTER, CommandOutput, Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on,
};
use firn_node::{Platform, wait_for};

const PORT: u16 = 7001;

const SERVE: &str = "nc -ll -p 7001 -e cat &
    until nc 127.0.0.1 7001 </dev/null; do sleep 0.1; done
    (while sleep 0.05; do echo x; done | nc 127.0.0.1 7001 >>/talk; echo closed >>/talk) &
    while :; do sleep 1; done";

/// A client of the node, which writes what the server returns.
const TALK: &str = "exec 3<>/dev/tcp/127.0.0.1/7001; while sleep 0.05; do echo x >&3 || break; \
    read -t 20 -u 3 line || break; echo $line; done >/tmp/talk; echo closed >>/tmp/talk";

const WAIT: Duration = Duration::from_secs(60);

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

fn job<'h>(host: &'h GpuHost, options: &[&str]) -> Result<Container<'h>> {
    let script = format!("{COUNTER} &\n{SERVE}");
    let job = Container::script(host, "job", &["0"], 1, options, &script)?;
    job.goes_on(3)?;
    talks_on(&job)?;
    Ok(job)
}

fn talk(job: &Container<'_>) -> Result<String> {
    job.exec(&["cat", "/talk"])
}

/// The job's own client and server are connected.
fn talks_on(job: &Container<'_>) -> Result<()> {
    let before = talk(job).unwrap_or_default().len();
    wait_for("the job's client to get answers", WAIT, || {
        let now = talk(job).unwrap_or_default();
        ensure!(!now.contains("closed"), "the job's client lost its server");
        Ok((now.len() > before + 4).then_some(()))
    })
}

/// The node's client is connected to the server.
fn outside_talks_on(host: &GpuHost) -> Result<()> {
    let now = || host.node().read("/tmp/talk").unwrap_or_default();
    let before = now().len();
    wait_for("the node's client to get answers", WAIT, || {
        ensure!(!now().contains("closed"), "the node's client lost its server");
        Ok((now().len() > before + 4).then_some(()))
    })
}

/// Waits until so many processes of the server run, each of which has a connection.
fn serves(job: &Container<'_>, count: usize) -> Result<()> {
    let waited = wait_for(&format!("{count} served clients"), WAIT, || {
        let list = job.exec(&["ps", "-o", "comm,stat,args"])?;
        let is_served =
            |row: &&str| row.starts_with("cat ") && !row.contains("/talk") && !row.contains(" Z ");
        Ok((list.lines().filter(is_served).count() == count).then_some(()))
    });
    waited.with_context(|| job.exec(&["ps", "-o", "comm,stat,args"]).unwrap_or_default())
}

fn connections_are_refused_by_name_and_kept_in_the_source(platform: Platform) -> Result<()> {
    on(
        [host(platform, "tcp-a", 1)?, host(platform, "tcp-b", 2)?],
        |[a, b]| {
            a.watch_runc()?;
            let source = job(a, &["--net-host"])?;
            let mut client = a.node().spawn(&["bash", "-c", TALK])?;
            outside_talks_on(a)?;
            let output = failure(source.checkpoint("checkpoint/job"))?;
            let named = [
                "FIRN-TCP:",
                "(cat): 127.0.0.1:7001 to 127.0.0.1:",
                "(nc): 127.0.0.1:",
                "firn.dev/tcp=auto",
            ];
            for part in named {
                ensure!(output.contains(part), "no {part:?} in {output}");
            }
            ensure!(!a.runc_has("checkpoint")?, "runc was called");
            let audit = a.firn_shows(&["audit", "job"])?.1.to_string();
            ensure!(audit.contains("FIRN-TCP"), "{audit}");
            outside_talks_on(a)?;

            a.configure("[checkpoint]\ntcp = \"auto\"\n")?;
            let audit = a.firn(&["audit", "job"])?.to_string();
            ensure!(
                audit.contains("in a copy 2 continue, 1 are closed (process "),
                "{audit}"
            );
            source.checkpoint("checkpoint/job")?;
            source.goes_on(3)?;
            talks_on(&source)?;
            outside_talks_on(a)?;
            serves(&source, 2)?;
            a.send_image("checkpoint/job", b)?;
            source.remove()?;
            client.wait()?;
            a.idle()?;

            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            talks_on(&copy)?;
            serves(&copy, 1)?;
            b.configure("[checkpoint]\ntcp = \"auto\"\n")?;
            copy.checkpoints_again("checkpoint/job")?;
            talks_on(&copy)?;
            copy.remove()?;
            b.idle()
        },
    )
}

fn closed_connections_end_in_the_copy_alone(platform: Platform) -> Result<()> {
    on(
        [host(platform, "tcp-c", 1)?, host(platform, "tcp-d", 2)?],
        |[a, b]| {
            let source = job(a, &["--net-host", "--annotation", "firn.dev/tcp=close"])?;
            let mut client = a.node().spawn(&["bash", "-c", TALK])?;
            outside_talks_on(a)?;
            source.checkpoint("checkpoint/job")?;
            source.goes_on(3)?;
            talks_on(&source)?;
            outside_talks_on(a)?;
            a.send_image("checkpoint/job", b)?;
            source.remove()?;
            client.wait()?;
            a.idle()?;

            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            wait_for("the job's client to see its server gone", WAIT, || {
                Ok(talk(&copy)?.contains("closed").then_some(()))
            })?;
            serves(&copy, 0)?;
            let mut client = b.node().spawn(&["bash", "-c", TALK])?;
            outside_talks_on(b).with_context(|| format!("a new client of port {PORT}"))?;
            copy.remove()?;
            client.wait()?;
            b.idle()
        },
    )
}

/// Bytes had arrived, and then the end of what was sent. The copy lacks the bytes, and its reader must not
/// take that for the end. Others find the end.
fn a_copy_that_lacks_received_bytes_has_no_end_to_read(platform: Platform) -> Result<()> {
    /// Reads each connection once the file /go is there.
    const SCRIPT: &str = r#"cat >/late.sh <<'END'
until [ -e /go ]; do sleep 0.1; done
cat >/late-$$ 2>&1
echo "status $?" >>/late-$$
END
nc -ll -p 7003 -e sh /late.sh &
while :; do sleep 1; done"#;
    /// A client that ends after its byte, one that stays, and one that ends without a byte.
    const CLIENTS: &str = "exec 3<>/dev/tcp/127.0.0.1/7003 4<>/dev/tcp/127.0.0.1/7003 \
        5<>/dev/tcp/127.0.0.1/7003; printf x >&3; printf x >&4; exec 3>&- 5>&-; sleep 1000";
    on([host(platform, "tcp-lost", 1)?], |[host]| {
        for word in ["close", "auto"] {
            let script = format!("{COUNTER} &\n{SCRIPT}");
            let tcp = format!("firn.dev/tcp={word}");
            let options = ["--net-host", "--annotation", &tcp];
            let source = Container::script(host, "job", &["0"], 1, &options, &script)?;
            source.goes_on(3)?;
            let retried = format!("until exec 9<>/dev/tcp/127.0.0.1/7003; do sleep 0.1; done; {CLIENTS}");
            let mut clients = host.node().spawn(&["bash", "-c", &retried])?;
            wait_for("the bytes", WAIT, || {
                let audit = host.firn(&["audit", "job"])?.to_string();
                let (_, lost) = audit.split_once("not read, lost: ").unwrap_or_default();
                let is_lost = lost.matches("127.0.0.1:7003 to ").count() == 1;
                Ok((is_lost && audit.contains(" 4 are closed")).then_some(()))
            })?;
            source.checkpoint("checkpoint/job")?;
            source.remove()?;
            clients.kill()?;
            clients.wait()?;
            let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
            copy.exec(&["touch", "/go"])?;
            let read = wait_for("what the copy reads", WAIT, || {
                let read = copy.exec(&["sh", "-c", "cat /late-*"])?;
                Ok((read.matches("status").count() == 4).then_some(read))
            })?;
            let failures = read.matches(" not connected\nstatus 1\n").count();
            let ends = read.matches("status 0\n").count();
            ensure!((failures, ends) == (1, 3), "{word}: {read}");
            copy.remove()?;
            host.remove_image("checkpoint/job")?;
        }
        host.idle()
    })
}

/// In a network of its own.
fn connections_inside_continue_in_a_network_of_the_containers_own(platform: Platform) -> Result<()> {
    on([host(platform, "tcp-own", 1)?], |[host]| {
        for tcp in ["keep", "auto"] {
            let annotation = format!("firn.dev/tcp={tcp}");
            let source = job(host, &["--annotation", &annotation])?;
            source.checkpoint("checkpoint/job")?;
            source.goes_on(3)?;
            talks_on(&source)?;
            source.remove()?;
            host.idle()?;
            let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            talks_on(&copy)?;
            copy.remove()?;
            host.remove_image("checkpoint/job")?;
            nothing_left(host, "job")?;
            host.idle()?;
        }
        Ok(())
    })
}

/// `firn` with these words is refused with this code, and its hint names the option.
fn wants(host: &GpuHost, words: &[&str], code: &str, option: &str) -> Result<()> {
    let output = failure(host.node().run(&[&["firn"], words].concat()))?;
    for part in [&format!("{code}: "), option] {
        ensure!(output.contains(part), "{part}: {output}");
    }
    Ok(())
}

/// A job that has run for days needs no new container: what its annotations refuse, a command may allow for
/// one checkpoint, and for no other.
fn a_command_allows_what_the_container_does_not(platform: Platform) -> Result<()> {
    on([host(platform, "tcp-once", 1)?], |[host]| {
        let source = job(host, &["--annotation", "firn.dev/tcp=refuse"])?;
        let exec = ["ctr", "tasks", "exec", "--detach", "--exec-id", "shell", "job"];
        host.node().run(&[&exec[..], &["sleep", "1000"]].concat())?;
        let to = ["/srv/job.tar", "checkpoint/job", "/srv/job"];
        for place in to {
            let plain = ["checkpoint", "job", place];
            let with_tcp = [&plain[..], &["--tcp", "auto"]].concat();
            wants(host, &with_tcp, "FIRN-EXEC", "firn checkpoint --exec omit")?;
            let with_exec = [&plain[..], &["--exec", "omit"]].concat();
            wants(host, &with_exec, "FIRN-TCP", "firn checkpoint --tcp auto")?;
            host.firn(&[&with_tcp[..], &["--exec", "omit"]].concat())?;
            source.goes_on(3)?;
            talks_on(&source)?;
            wants(
                host,
                &["checkpoint", "job", "/srv/other.tar"],
                "FIRN-EXEC",
                "firn checkpoint --",
            )?;
        }
        let audit =
            |more: &[&str]| Ok::<_, anyhow::Error>(host.firn_shows(&[&["audit", "job"], more].concat())?.1);
        ensure!(audit(&[])?["verdict"] == "cannot", "{}", audit(&[])?);
        let allowed = audit(&["--tcp", "auto", "--exec", "omit"])?;
        ensure!(allowed["verdict"] != "cannot", "{allowed}");
        ensure!(
            job_has(&source, "sleep 1000")?,
            "the process of exec has ended in the source"
        );
        source.remove()?;
        for from in ["/srv/job.tar", "checkpoint/job"] {
            host.firn(&["restore", from])?;
            let copy = Container::known(host, "job").counting(1);
            copy.goes_on(3)?;
            talks_on(&copy)?;
            ensure!(
                !job_has(&copy, "sleep 1000")?,
                "the process of exec is in the copy"
            );
            copy.remove()?;
        }
        host.remove_image("checkpoint/job")?;
        host.node().run(&["rm", "-r", "/srv/job.tar", "/srv/job"])?;
        host.idle()
    })
}

fn job_has(job: &Container<'_>, process: &str) -> Result<bool> {
    Ok(job.exec(&["ps", "-o", "args"])?.contains(process))
}

fn a_container_without_gpus_keeps_connections_by_the_same_option(platform: Platform) -> Result<()> {
    on([host(platform, "tcp-plain", 1)?], |[host]| {
        let source = Container::beat(host, "job", &[], &format!("({SERVE}) &\n"))?;
        talks_on(&source)?;
        let audit = |more: &[&str]| host.firn_shows(&[&["audit", "job"], more].concat());
        let (status, refused) = audit(&[])?;
        let refused = refused.to_string();
        let is_named = refused.contains("FIRN-TCP") && refused.contains("--tcp keep");
        ensure!(status == Some(1) && is_named, "{refused}");
        let (status, accepted) = audit(&["--tcp", "keep"])?;
        ensure!(status == Some(0), "{accepted}");
        let words = ["checkpoint", "job", "/srv/job.tar"];
        let output = failure(host.node().run(&[&["firn"], &words[..]].concat()))?;
        ensure!(output.contains("Connected TCP socket"), "{output}");
        for word in ["close", "auto"] {
            let chosen = [&words[..], &["--tcp", word]].concat();
            wants(host, &chosen, "FIRN-TCP", "--tcp keep")?;
        }
        source.beats_on()?;
        host.firn(&[&words[..], &["--tcp", "keep"]].concat())?;
        source.beats_on()?;
        talks_on(&source)?;
        source.remove()?;
        host.firn(&["restore", "/srv/job.tar"])?;
        let copy = Container::known(host, "job");
        talks_on(&copy)?;
        copy.remove()?;
        host.node().run(&["rm", "/srv/job.tar"]).map(drop)
    })
}

/// As a probe that connects while the job is frozen. The server of this job is stopped.
fn a_connection_that_is_not_accepted_yet_is_left_out(platform: Platform) -> Result<()> {
    on([host(platform, "tcp-new", 1)?], |[host]| {
        let script =
            format!("{COUNTER} &\nnc -ll -p 7001 -e cat & sleep 1; kill -STOP $!; while :; do sleep 1; done");
        let job = Container::script(host, "job", &["0"], 1, &["--net-host"], &script)?;
        job.goes_on(3)?;
        wait_for("the server to stop", WAIT, || {
            let states = job.exec(&["ps", "-o", "stat"])?;
            Ok(states.contains("\nT").then_some(()))
        })?;
        let mut client = host.node().spawn(&["bash", "-c", TALK])?;
        wait_for("a client", WAIT, || {
            let table = host.node().run(&["cat", "/proc/net/tcp"])?.stdout;
            Ok(table.contains(" 0100007F:1B59 01 ").then_some(()))
        })?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.exec(&["killall", "-CONT", "nc"])?;
        outside_talks_on(host)?;
        job.remove()?;
        client.wait()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.exec(&["killall", "-CONT", "nc"])?;
        serves(&copy, 0)?;
        copy.remove()?;
        host.idle()
    })
}

/// A server and a client, which send what is written into /to-client and /to-server. Nothing is on its way
/// when CRIU is killed: threads run for a moment then.
const PAIR: &str = "mkfifo /to-client /to-server
    (exec 3<>/to-client; nc -l -p 7001 <&3 >/at-server) &
    until grep -q ':1B59 0*:0000 0A' /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done
    (exec 3<>/to-server; nc 127.0.0.1 7001 <&3 >/at-client) &
    while :; do sleep 1; done";

/// What one end sends arrives at the other.
fn carries(job: &Container<'_>, text: &str) -> Result<()> {
    for (from, to) in [("/to-server", "/at-server"), ("/to-client", "/at-client")] {
        job.exec(&["sh", "-c", &format!("echo {text} >{from}")])?;
        wait_for(&format!("{text:?} in {to}"), WAIT, || {
            Ok(job.exec(&["cat", to])?.contains(text).then_some(()))
        })?;
    }
    Ok(())
}

/// What CRIU is sent, and how firn names the cause.
const BLOWS: [(&str, &str); 2] = [("KILL", "FIRN-DUMP"), ("STOP", "did not end within")];

fn connections_survive_a_criu_that_is_killed(platform: Platform) -> Result<()> {
    on([host(platform, "tcp-kill", 1)?], |[host]| {
        let node = host.node();
        host.install_blow()?;
        host.configure("[deadlines]\ncriu-dump = \"4s\"\n")?;
        let rules = || Ok::<_, anyhow::Error>(node.run(&["iptables", "-S"])?.stdout);
        let before = rules()?;
        for network in [&[][..], &["--net-host"]] {
            let options = [&["--annotation", "firn.dev/tcp=auto"], network].concat();
            let script = format!("{COUNTER} &\n{PAIR}");
            let job = Container::script(host, "job", &["0"], 1, &options, &script)?;
            job.goes_on(3)?;
            carries(&job, "first")?;
            for (signal, cause) in BLOWS {
                host.blow(&format!("{signal} criu"))?;
                let output = failure(job.checkpoint("checkpoint/job"))?;
                ensure!(output.contains(cause), "{output}");
                host.was_struck().context(output.clone())?;
                job.goes_on(3)?;
                carries(&job, &format!("after-{signal}"))
                    .with_context(|| format!("{signal}, {network:?}\n{output}"))?;
                ensure!(rules()? == before, "rules are left: {}", rules()?);
            }
            job.checkpoint("checkpoint/job")?;
            carries(&job, "second")?;
            job.remove()?;
            let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
            carries(&copy, "third")?;
            copy.remove()?;
            host.remove_image("checkpoint/job")?;
            host.idle()?;
        }
        Ok(())
    })
}

/// As containers of a pod share one. What is left there by a checkpoint concerns the others.
fn a_shared_network_is_released_when_the_container_ends(platform: Platform) -> Result<()> {
    on([host(platform, "tcp-pod", 1)?], |[host]| {
        let node = host.node();
        host.install_blow()?;
        node.run(&["ip", "netns", "add", "pod"])?;
        node.run(&["ip", "-n", "pod", "link", "set", "lo", "up"])?;
        let rules = || {
            let listed = node.run(&["ip", "netns", "exec", "pod", "iptables", "-S"])?;
            Ok::<_, anyhow::Error>(listed.stdout)
        };
        let before = rules()?;
        for (order, kills) in [("STOP criu", true), ("KILL containerd-shim", false)] {
            let options = [
                "--with-ns",
                "network:/run/netns/pod",
                "--annotation",
                "firn.dev/tcp=auto",
            ];
            let job = Container::script(host, "job", &["0"], 1, &options, &format!("{COUNTER} &\n{PAIR}"))?;
            job.goes_on(3)?;
            carries(&job, "first")?;
            host.blow(order)?;
            let client = job.begin_checkpoint("checkpoint/job")?;
            wait_for("CRIU to be hit", WAIT, || Ok(host.was_struck().ok()))?;
            if kills {
                ensure!(rules()?.contains("CRIU"), "nothing is locked");
                job.task(&["kill", "--signal", "SIGKILL"])?;
            }
            CommandOutput::wait(client)?.failed()?;
            wait_for("the network to be released", WAIT, || {
                Ok((rules()? == before).then_some(()))
            })
            .with_context(|| format!("{order}: {:?}", rules()))?;
            job.remove()?;
            host.idle()?;
        }
        node.run(&["ip", "netns", "delete", "pod"]).map(drop)
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        connections_are_refused_by_name_and_kept_in_the_source [FORKY];
        closed_connections_end_in_the_copy_alone [FORKY];
        connections_inside_continue_in_a_network_of_the_containers_own [FORKY];
        a_command_allows_what_the_container_does_not [FORKY];
        a_copy_that_lacks_received_bytes_has_no_end_to_read [FORKY, FORKY_V2];
        a_container_without_gpus_keeps_connections_by_the_same_option [FORKY];
        a_connection_that_is_not_accepted_yet_is_left_out [FORKY_V2];
        connections_survive_a_criu_that_is_killed [FORKY, FORKY_V2];
        a_shared_network_is_released_when_the_container_ends [FORKY, FORKY_V2];
    })
}
