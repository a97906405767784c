//! A Kubernetes of two nodes: the control plane, a kubelet and two GPUs on the first, a kubelet and two GPUs
//! on the second, joined by a cable.

use std::ops::Deref;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{GpuHost, Platform, SimGpu, configure_pods, import_pod_images, install_network_plugin};
use firn_node::{GoOptions, Link, Node, go_build_of, go_install, link, wait_for};
use serde_json::Value;

const PROGRAMS: [&str; 6] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
];
const NETWORK_PLUGINS: &str = "github.com/containernetworking/plugins/plugins";
const NETWORK_PLUGINS_VERSION: &str = "v1.9.1";
const DEVICE_PLUGIN: (&str, &str) = ("github.com/NVIDIA/k8s-device-plugin", "v0.19.0");

const DIR: &str = "/etc/kubernetes";
const KUBECONFIG: &str = "/etc/kubernetes/admin.conf";
/// Of a user who has the roles for drains and nothing else.
const DRAINER: &str = "/etc/kubernetes/drainer.conf";
pub const RUNTIME_CLASS: &str = include_str!("../../../../config/kubernetes/runtimeclass.yaml");
/// Address of the Service `kubernetes`.
const API_SERVICE: &str = "10.96.0.1";
/// How long the parts of a cluster may take to be ready.
const READY: Duration = Duration::from_secs(60);
/// How long a pod may take to become what is waited for.
pub const LIMIT: Duration = Duration::from_secs(90);

/// What the kubelet would set for the whole machine, and finds in these files instead.
const KERNEL: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// A node of the cluster.
pub struct Member {
    pub host: GpuHost,
    /// Third number of its pods' addresses.
    pods: u8,
}

impl Deref for Member {
    type Target = Node;

    fn deref(&self) -> &Node {
        self.host.node()
    }
}

pub struct Cluster {
    pub north: Member,
    pub south: Member,
}

impl Cluster {
    /// Starts it, from programs that are built already.
    pub fn start(platform: Platform, programs: &Path) -> Result<Self> {
        let member = |name, pods, gpus: [u32; 2]| -> Result<Member> {
            let gpus = gpus.map(SimGpu::h200);
            let host = GpuHost::for_cri(platform, name, &gpus, |node| {
                // The kubelet's mounts have to reach containers.
                node.run(&["mount", "--make-rshared", "/"])?;
                install(node, programs, pods)
            })?;
            import_pod_images(host.node())?;
            Ok(Member { host, pods })
        };
        let cluster = Self {
            north: member("north", 1, [1, 2])?,
            south: member("south", 2, [3, 4])?,
        };
        let link = link(&cluster.north, &cluster.south)?;
        cluster.join(link).inspect_err(|_| cluster.show())?;
        Ok(cluster)
    }

    fn join(&self, link: Link) -> Result<()> {
        self.start_control_plane(link)?;
        for (member, address, other) in [(&self.north, link.a, link.b), (&self.south, link.b, link.a)] {
            let others = if member.pods == 1 { 2 } else { 1 };
            let route = format!("10.88.{others}.0/24");
            member.run(&["ip", "route", "add", &route, "via", &other.to_string()])?;
            member.run(&["ip", "route", "add", "default", "via", &other.to_string()])?;
            self.start_kubelet(member, &link.a.to_string(), &address.to_string())?;
            start_device_plugin(member)?;
        }
        self.apply(RUNTIME_CLASS)?;
        for member in self.members() {
            wait_for(&format!("the GPUs of {}", member.name()), READY, || {
                let node = self.get(&["node", member.name()])?;
                Ok((node["status"]["allocatable"]["nvidia.com/gpu"] == "2").then_some(()))
            })?;
        }
        Ok(())
    }

    fn start_control_plane(&self, link: Link) -> Result<()> {
        let node = &self.north;
        node.run(&["mkdir", "-p", DIR])?;
        // What kube-proxy does: pods reach the API by the address of its Service.
        node.run(&["ip", "address", "add", &format!("{API_SERVICE}/32"), "dev", "lo"])?;
        node.run(&["openssl", "genrsa", "-out", "/etc/kubernetes/sa.key", "2048"])?;
        node.write(
            format!("{DIR}/tokens.csv"),
            "admin-token,admin,admin,system:masters\ndrainer-token,drainer,drainer\n",
        )?;
        let address = link.a.to_string();
        write_kubeconfig(node, &address)?;
        let drainer = node.read(KUBECONFIG)?.replace("admin-token", "drainer-token");
        node.write(DRAINER, drainer)?;
        daemon(
            node,
            "etcd --data-dir=/var/lib/etcd --listen-client-urls=http://127.0.0.1:2379 \
             --advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380 \
             --unsafe-no-fsync --log-level=warn",
        )?;
        daemon(
            node,
            &format!(
                "kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 \
                 --secure-port=443 --advertise-address={address} --service-cluster-ip-range=10.96.0.0/24 \
                 --cert-dir={DIR}/pki --token-auth-file={DIR}/tokens.csv --authorization-mode=RBAC \
                 --service-account-issuer=https://kubernetes.default.svc \
                 --service-account-key-file={DIR}/sa.key --service-account-signing-key-file={DIR}/sa.key \
                 --allow-privileged=true \
                 --kubelet-preferred-address-types=InternalIP"
            ),
        )?;
        wait_for("the API server", READY, || {
            Ok(self.kubectl(&["get", "--raw", "/readyz"]).ok())
        })?;
        let tokens = format!(
            "--service-account-private-key-file={DIR}/sa.key --root-ca-file={DIR}/pki/apiserver.crt \
             --use-service-account-credentials=false"
        );
        for (program, options) in [
            ("kube-controller-manager", tokens.as_str()),
            ("kube-scheduler", ""),
        ] {
            daemon(
                node,
                &format!("{program} --kubeconfig={KUBECONFIG} --leader-elect=false {options}"),
            )?;
        }
        Ok(())
    }

    fn start_kubelet(&self, member: &Member, server: &str, address: &str) -> Result<()> {
        write_kubeconfig(member, server)?;
        member.write(format!("{DIR}/kubelet.yaml"), KUBELET)?;
        for (name, value) in KERNEL {
            let file = format!("/run/kernel/{name}");
            member.write(&file, value)?;
            member.run(&["mount", "--bind", &file, &format!("/proc/sys/{name}")])?;
        }
        daemon(
            member,
            &format!(
                "kubelet --config={DIR}/kubelet.yaml --kubeconfig={KUBECONFIG} --node-ip={address} \
                 --hostname-override={} --node-labels=nvidia.com/gpu.present=true --v=2",
                member.name()
            ),
        )?;
        wait_for(&format!("node {}", member.name()), READY, || {
            let Ok(node) = self.get(&["node", member.name()]) else {
                return Ok(None);
            };
            let conditions = node["status"]["conditions"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
            Ok(conditions.iter().any(ready).then_some(()))
        })?;
        for (name, _) in KERNEL {
            member.run(&["umount", &format!("/proc/sys/{name}")])?;
        }
        Ok(())
    }

    /// Runs kubectl as the administrator, and returns what it prints.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let kubectl = ["kubectl", "--kubeconfig", KUBECONFIG];
        Ok(self.north.run(&[&kubectl[..], arguments].concat())?.stdout)
    }

    /// What `kubectl get` shows of these.
    pub fn get(&self, what: &[&str]) -> Result<Value> {
        let shown = self.kubectl(&[&["get", "--output", "json"], what].concat())?;
        serde_json::from_str(&shown).with_context(|| format!("read what kubectl shows of {what:?}"))
    }

    /// Makes these objects, or changes them.
    pub fn apply(&self, manifests: &str) -> Result<()> {
        self.north.write("/tmp/manifests.yaml", manifests)?;
        self.kubectl(&["apply", "--filename", "/tmp/manifests.yaml"])
            .map(drop)
    }

    /// Both nodes.
    pub fn members(&self) -> [&Member; 2] {
        [&self.north, &self.south]
    }

    /// Runs `firn drain` as a user who may do that and nothing else. Returns whether it succeeded, and all
    /// that it printed.
    pub fn drain(&self, arguments: &[&str]) -> Result<(bool, String)> {
        let mut command = self.north.command("firn");
        command.arg("drain").args(arguments).env("KUBECONFIG", DRAINER);
        let output = command.stdin(Stdio::null()).output()?;
        let printed = [output.stdout, output.stderr].concat();
        Ok((
            output.status.success(),
            String::from_utf8_lossy(&printed).into_owned(),
        ))
    }

    /// Prints the ends of all logs.
    pub fn show(&self) {
        for member in self.members() {
            let logs = "cd /var/log; for log in kube* nvidia* etcd* containerd.log; do \
                        [ ! -e $log ] || { echo \"== $log\"; tail -n 30 $log; }; done";
            let shown = member.run(&["sh", "-c", logs]);
            eprintln!(
                "{}: {}",
                member.name(),
                shown.map(|shown| shown.stdout).unwrap_or_default()
            );
        }
        for what in [&["get", "pods,events", "-A"][..], &["describe", "pods", "-A"]] {
            eprintln!("{}", self.kubectl(what).unwrap_or_default());
        }
    }
}

/// Puts the programs on a node whose containerd has not started, and configures it.
fn install(node: &Node, programs: &Path, pods: u8) -> Result<()> {
    let all = "/usr/local/lib/kubernetes";
    node.install(programs, all, 0o755)?;
    for program in PROGRAMS {
        node.run(&["ln", "-s", all, &format!("/usr/local/bin/{program}")])?;
    }
    for plugin in ["main/bridge", "main/loopback", "ipam/host-local"] {
        let built = go_install(&format!("{NETWORK_PLUGINS}/{plugin}"), NETWORK_PLUGINS_VERSION)?;
        let (_, name) = plugin.split_once('/').context("a plugin has a kind")?;
        install_network_plugin(node, &built, name)?;
    }
    node.write(
        "/etc/cni/net.d/pods.conflist",
        NETWORK.replace("SUBNET", &format!("10.88.{pods}.0/24")),
    )?;
    let options = GoOptions {
        cgo: true,
        // It calls functions of NVML by their names, of which a driver may lack some.
        ldflags: "-extldflags=-Wl,-z,lazy",
        tags: "",
    };
    let (module, version) = DEVICE_PLUGIN;
    let plugin = go_build_of(module, version, "cmd/nvidia-device-plugin", options, |_| Ok(()))?;
    node.install(&plugin, "/usr/local/bin/nvidia-device-plugin", 0o755)?;
    configure_pods(node, "")
}

/// Starts a program of Kubernetes, which runs as long as the node. Its log is /var/log/PROGRAM.log.
fn daemon(node: &Node, command: &str) -> Result<()> {
    let program = command
        .split(' ')
        .find(|word| *word != "env" && !word.contains('='));
    let program = program.context("no program")?;
    let start = format!("exec {command} >/var/log/{program}.log 2>&1 </dev/null");
    let started = node
        .command("setsid")
        .args(["--fork", "sh", "-c", &start])
        .stdin(Stdio::null())
        .status()?;
    ensure!(started.success(), "cannot start {program}");
    Ok(())
}

fn start_device_plugin(member: &Member) -> Result<()> {
    // NVIDIA's generator leaves out block devices, which simulated GPUs are (decision 0006): the plugin runs
    // without a CDI file of its own, and names devices of a kind that only it has.
    let devices = member.read("/etc/cdi/nvidia.json")?;
    member.write(
        "/etc/cdi/device-plugin.json",
        devices.replace("nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu"),
    )?;
    let socket = "/var/lib/kubelet/device-plugins/kubelet.sock";
    wait_for("the kubelet's socket for plugins", READY, || {
        Ok(member.path(socket).exists().then_some(()))
    })?;
    run_device_plugin(member, &["--device-list-strategy=cdi-cri"])
}

fn run_device_plugin(member: &Member, options: &[&str]) -> Result<()> {
    // It would watch for errors of the GPUs, which simulated ones do not have.
    daemon(
        member,
        &format!(
            "env DP_DISABLE_HEALTHCHECKS=all nvidia-device-plugin {} \
             --gds-enabled=false --mofed-enabled=false --gdrcopy-enabled=false --driver-root-ctr-path=/ \
             --nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook",
            options.join(" ")
        ),
    )
}

/// Ends the plugin of a node and starts it with other options; returns when the kubelet offers so many GPUs.
pub fn restart_device_plugin(cluster: &Cluster, member: &Member, options: &[&str], gpus: &str) -> Result<()> {
    let offered = |count: &str| {
        wait_for(&format!("{count} GPUs of {}", member.name()), READY, || {
            let node = cluster.get(&["node", member.name()])?;
            Ok((node["status"]["allocatable"]["nvidia.com/gpu"] == count).then_some(()))
        })
    };
    let processes = member.processes().into_iter();
    for plugin in processes.filter(|process| process.command.starts_with("nvidia-device")) {
        member.run(&["kill", &plugin.pid.to_string()])?;
    }
    offered("0")?;
    run_device_plugin(member, options)?;
    offered(gpus)
}

fn write_kubeconfig(node: &Node, server: &str) -> Result<()> {
    node.write(KUBECONFIG, ADMIN.replace("SERVER", server))
}

const ADMIN: &str = "apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: 'https://SERVER:443', insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: admin-token}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
";

const NETWORK: &str = r#"{"cniVersion": "1.0.0", "name": "pods", "plugins": [{
  "type": "bridge", "bridge": "pods0", "isGateway": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "SUBNET"}]], "routes": [{"dst": "0.0.0.0/0"}]}
}]}"#;

const KUBELET: &str = "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
protectKernelDefaults: true
localStorageCapacityIsolation: false
enforceNodeAllocatable: []
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
resolvConf: ''
fileCheckFrequency: 2s
syncFrequency: 5s
nodeStatusUpdateFrequency: 5s
";
