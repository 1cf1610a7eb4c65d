//! Harness of the whole-system tests: processes and clusters that always stop. Holds no test itself.

pub mod abuse;
pub mod agent;
pub mod agent_pod;
pub mod axe;
pub mod browser;
pub mod bystanders;
pub mod clients;
pub mod cluster;
pub mod demo;
pub mod docs;
pub mod faults;
pub mod fleet;
pub mod gateway;
pub mod hub;
pub mod looks;
pub mod measured;
pub mod operator;
pub mod picture;
pub mod playground;
pub mod process;
pub mod python;
pub mod readers;
pub mod resumes;
pub mod skip;
pub mod steady;
pub mod transit;
