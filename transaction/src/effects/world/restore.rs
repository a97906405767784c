//! What a restore does to the fake container.

use super::*;

impl Restore for World {
    async fn criu_restore(&mut self) -> Result<(), Injected> {
        self.has_worker = true;
        // CRIU that fails leaves processes.
        (self.exists, self.stopped) = (true, true);
        self.call("criu_restore")
    }

    async fn compare(&mut self) -> Result<(), Injected> {
        self.call("compare")?;
        self.compared = true;
        Ok(())
    }

    async fn dev_repair(&mut self) -> Result<(), Injected> {
        self.call("dev_repair")
    }

    async fn fill_memory(&mut self) -> Result<(), Injected> {
        assert!(
            self.compared,
            "memory is filled before the processes were compared"
        );
        self.call("fill_memory")
    }

    async fn find_cuda(&mut self) -> Result<Vec<CudaProcess>, Injected> {
        self.call("find_cuda")?;
        Ok(self.processes())
    }

    async fn run_selected(&mut self, tids: BTreeSet<i32>) -> Result<(), Injected> {
        assert!(self.compared, "threads run before their rights were compared");
        let threads: BTreeSet<i32> = self
            .processes()
            .iter()
            .map(|process| process.restore_tid)
            .collect();
        assert_eq!(tids, threads);
        self.call("run_selected")?;
        self.selected = true;
        Ok(())
    }

    async fn stop_selected(&mut self) -> Result<(), Injected> {
        self.call("stop_selected")?;
        self.selected = false;
        Ok(())
    }

    async fn configure_dump(&mut self) -> Result<(), Injected> {
        self.call("configure_dump")?;
        self.can_be_dumped = true;
        Ok(())
    }

    async fn write_facts(&mut self) -> Result<(), Injected> {
        assert!(
            self.stopped,
            "the job runs before it can know what has changed: {:?}",
            self.calls
        );
        self.call("write_facts")
    }

    async fn continue_processes(&mut self) -> Result<(), Injected> {
        assert!(
            !self.selected,
            "restore threads run as selected: {:?}",
            self.calls
        );
        self.call("continue_processes")?;
        self.stopped = false;
        self.check();
        Ok(())
    }

    async fn end(&mut self, ok: bool) {
        assert_eq!(ok, self.exists && !self.stopped, "{:?}", self.calls);
        self.has_worker = false;
    }

    async fn rollback(&mut self) {
        assert!(!self.has_worker, "the worker still runs: {:?}", self.calls);
        (self.exists, self.stopped) = (false, false);
        self.states.clear();
    }
}
