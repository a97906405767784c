#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_transaction::fuzz::restore_from(data));
