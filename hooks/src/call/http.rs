//! A hook by HTTP: a POST to a loopback address of the container's network namespace.

use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firn_oci::Spec;
use nix::sched::{CloneFlags, setns};
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde_json::Value;
use ureq::Agent;

use super::init::Init;
use super::{OUTPUT, Output};

/// Who the container's programs are on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl User {
    /// The user of the spec's process. Fails for one that the spec's user namespace does not have.
    pub fn of(spec: &Spec) -> Result<Self> {
        let id = |map: &str, id: Option<&Value>| {
            let id = id.map_or(Some(0), Value::as_u64);
            let on_host = id.and_then(|id| on_host(spec.array(map), id));
            on_host.context("the user of the spec's process has no id on the host")
        };
        let user = spec.value().pointer("/process/user");
        let of = |key: &str| user.and_then(|user| user.get(key));
        let groups = of("additionalGids").and_then(Value::as_array);
        let groups = groups.into_iter().flatten();
        Ok(Self {
            uid: id("/linux/uidMappings", of("uid"))?,
            gid: id("/linux/gidMappings", of("gid"))?,
            groups: groups
                .map(|group| id("/linux/gidMappings", Some(group)))
                .collect::<Result<_>>()?,
        })
    }

    /// Becomes that user, in this thread alone, without any capability unless it is root.
    fn become_it(&self) -> io::Result<()> {
        let groups: Vec<Gid> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        set_thread_groups(&groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        Ok(set_thread_res_uid(uid, uid, uid)?)
    }
}

/// The id on the host of one in the container. Without mappings it is the same.
fn on_host(mappings: &[Value], id: u64) -> Option<u32> {
    if mappings.is_empty() {
        return u32::try_from(id).ok();
    }
    let of = |mapping: &Value| {
        let number = |key: &str| mapping.get(key)?.as_u64();
        let offset = id.checked_sub(number("containerID")?)?;
        let host = number("hostID")?.checked_add(offset)?;
        (offset < number("size")?).then_some(host)
    };
    mappings.iter().find_map(of).and_then(|id| u32::try_from(id).ok())
}

/// What the server answered.
pub struct Response {
    status: u16,
    text: Vec<u8>,
    failure: Option<io::Error>,
}

impl Response {
    /// Succeeds with a status of success.
    pub fn result(self, url: &str, output: &mut Output) -> Result<()> {
        output.add(&self.text);
        if !(200..300).contains(&self.status) {
            bail!("{url} answered {}", self.status);
        }
        match self.failure {
            Some(failure) => Err(failure).with_context(|| format!("cannot read the answer of {url}")),
            None => Ok(()),
        }
    }
}

/// Posts the body, as the user and in the network namespace of the container: for a firewall and for the
/// server it comes from a program of the container.
pub fn post(init: &Init, user: User, url: &str, body: String, deadline: Instant) -> Result<Response> {
    let namespace = format!("/proc/{}/ns/net", init.pid());
    let opened = || File::open(&namespace).with_context(|| format!("cannot open {namespace}"));
    let file = init.look(opened)?;
    // Namespace and user are those of one thread: the output is kept by root.
    let posted = std::thread::scope(|scope| {
        let enter = || -> Result<Response> {
            setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter {namespace}"))?;
            user.become_it()
                .with_context(|| format!("cannot become user {}", user.uid))?;
            send(url, body, deadline)
        };
        scope.spawn(enter).join()
    });
    posted.unwrap_or_else(|_| bail!("the call of {url} has failed"))
}

fn send(url: &str, body: String, deadline: Instant) -> Result<Response> {
    let left = deadline.saturating_duration_since(Instant::now());
    let agent = Agent::config_builder()
        .timeout_global(Some(left.max(Duration::from_millis(1))))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(None)
        .user_agent(concat!("firn/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent();
    let mut response = agent
        .post(url)
        .content_type("application/json")
        .send(body)
        .with_context(|| format!("cannot call {url}"))?;
    let mut text = Vec::new();
    let limit = u64::try_from(OUTPUT).unwrap_or(u64::MAX);
    let read = response.body_mut().as_reader().take(limit).read_to_end(&mut text);
    Ok(Response {
        status: response.status().as_u16(),
        text,
        failure: read.err(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use firn_host::procfs;
    use serde_json::json;

    use super::*;

    fn spec(user: Value, linux: Value) -> Spec {
        let dir = tempfile::tempdir().unwrap();
        let spec = json!({"ociVersion": "1.0.2", "process": {"user": user}, "linux": linux});
        std::fs::write(dir.path().join("config.json"), spec.to_string()).unwrap();
        Spec::load(dir.path()).unwrap()
    }

    #[test]
    fn the_user_is_that_of_the_spec_on_the_host() {
        let user = json!({"uid": 1000, "gid": 7, "additionalGids": [7, 44]});
        let plain = User::of(&spec(user.clone(), json!({}))).unwrap();
        let expected = |uid, gid, groups: &[u32]| User {
            uid,
            gid,
            groups: groups.to_vec(),
        };
        assert_eq!(plain, expected(1000, 7, &[7, 44]));
        assert_eq!(
            User::of(&spec(json!({}), json!({}))).unwrap(),
            expected(0, 0, &[])
        );
        let map = |from: u64, size: u64| json!([{"containerID": from, "hostID": 100_000, "size": size}]);
        let mapped = json!({"uidMappings": map(1000, 1), "gidMappings": map(0, 65536)});
        assert_eq!(
            User::of(&spec(user.clone(), mapped)).unwrap(),
            expected(100_000, 100_007, &[100_007, 100_044])
        );
        for uids in [map(0, 1000), map(1001, 5)] {
            let mapped = json!({"uidMappings": uids, "gidMappings": map(0, 65536)});
            User::of(&spec(user.clone(), mapped)).unwrap_err();
        }
    }

    /// The owner of the socket that has this local port.
    fn owner(port: u16) -> String {
        let local = format!(":{port:04X}");
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let fields = sockets
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let mut of_port = fields.filter(|fields| fields[1].ends_with(&local));
        of_port.next().unwrap()[7].to_owned()
    }

    #[test]
    fn the_call_comes_from_the_user_and_this_process_stays_root() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/x", server.local_addr().unwrap());
        let served = std::thread::spawn(move || {
            let (mut client, from) = server.accept().unwrap();
            let owner = owner(from.port());
            let lines = BufReader::new(client.try_clone().unwrap()).lines();
            let head: Vec<String> = lines
                .map(Result::unwrap)
                .take_while(|line| !line.is_empty())
                .collect();
            client
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                .unwrap();
            (owner, head.len())
        });
        let me = i32::try_from(std::process::id()).unwrap();
        let init = Init::open(me, procfs::started(me)).unwrap();
        let user = User {
            uid: 1000,
            gid: 1000,
            groups: Vec::new(),
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        let response = post(&init, user, &url, String::new(), deadline).unwrap();
        let mut output = Output::default();
        response.result(&url, &mut output).unwrap();
        assert_eq!(output.into_text(), "ok");
        assert_eq!(served.join().unwrap().0, "1000");
        assert!(nix::unistd::geteuid().is_root());
    }
}
