use super::*;
use crate::fixture::{self, Split};
use crate::scale::Scaling;
use ir::op::DType;
use ir::random;
use std::fs::File;

fn job() -> Job {
    fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 })
}

fn values(weights: &Weights) -> Vec<f64> {
    let mut out = vec![0.0; 3];
    weights.get(PersistentId::Param(0)).unwrap().read(0, &mut out);
    out
}

#[test]
fn what_was_written_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let (job, file) = (job(), File::create_new(&path).unwrap());
    let layout = SafetensorsLayout::new(&job);
    layout.start(&file).unwrap();
    layout.write(&file, PersistentId::Param(0), 1, &[2.0, -3.5]).unwrap();
    assert_eq!(values(&Weights::open(&path, &job).unwrap()), [0.0, 2.0, -3.5]);
}

#[test]
fn what_a_run_resumes_from_has_states_and_says_where_it_stood() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let (job, file) = (job(), File::create_new(&path).unwrap());
    SafetensorsLayout::of_run(&job, &Mark { step: 5, seed: 9, ..Mark::default() }, None).start(&file).unwrap();
    let most = Scaling { bits: u64::MAX, good: u64::MAX, patience: u64::MAX };
    let mark = Mark { step: u64::MAX, seed: u64::MAX, scaling: Some(most), sequences: Some(u64::MAX) };
    let layout = SafetensorsLayout::of_run(&job, &mark, None);
    layout.write(&file, PersistentId::State(0, 0), 2, &[4.0]).unwrap();
    layout.start(&file).unwrap();
    let Resumed { weights, mark: found, .. } = Weights::resume(&path, &job).unwrap();
    assert_eq!(found, mark);
    let mut state = [0.0; 3];
    weights.get(PersistentId::State(0, 0)).unwrap().read(0, &mut state);
    assert_eq!(state, [0.0, 0.0, 4.0]);
    assert!(Weights::open(&path, &job).unwrap().get(PersistentId::State(0, 0)).is_none());
}

#[test]
fn weights_alone_are_nothing_to_resume_from() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    SafetensorsLayout::new(&job()).start(&File::create_new(&path).unwrap()).unwrap();
    let Err(error) = Weights::resume(&path, &job()) else { panic!("it resumed") };
    assert!(error.to_string().contains("w.safetensors` starts a new one from its weights"), "{error}");
}

#[test]
fn random_parameters_depend_on_name_seed_and_index_alone() {
    let (job, mut alone) = (job(), [0.0]);
    let all = values(&Weights::random(&job, 7));
    Weights::random(&job, 7).get(PersistentId::Param(0)).unwrap().read(2, &mut alone);
    assert_eq!(alone[0], all[2]);
    assert_ne!(values(&Weights::random(&job, 8)), all);
    assert_eq!(all[1], random::normal(random::stream(random::key("w"), 7, 0), 1));
}

#[test]
fn all_tensors_that_do_not_fit_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let mut other = job();
    other.params[0].dims[0].size = 4;
    let mut more = other.params[0].clone();
    more.name = "b".into();
    other.params.push(more);
    other.settings = vec![("ins".into(), "4".into())];
    SafetensorsLayout::new(&other).start(&File::create_new(&path).unwrap()).unwrap();
    let mut here = job();
    here.settings = vec![("ins".into(), "3".into())];
    let Err(error) = Weights::open(&path, &here) else { panic!("it opened") };
    let wanted = "does not fit the model:\n  `w` is [4], the model has [3]\n  `b` is not in the model\n  \
                  the file says that it is of `linear` with other settings: ins = 4 (here 3)";
    assert!(error.to_string().ends_with(wanted), "{error}");
    let mut wanted = job();
    wanted.params[0].name = "u".into();
    let Err(error) = Weights::open(&path, &wanted) else { panic!("it opened") };
    assert!(error.to_string().contains("`u` is missing"), "{error}");
}

#[test]
fn what_is_no_tensor_is_left_out_of_initial_weights_and_named() {
    let job = job();
    let content = Content { tensors: vec![], run: None, model: None, conditions: None, others: vec!["epoch".into()] };
    let source = WeightsSource { file: "dcp".into(), content, wrong: Rc::default() };
    let (_, drawn, left_out) = Weights::together(vec![source], &job, &["*".into()], 7).unwrap();
    assert_eq!((drawn.len(), left_out), (job.params.len(), vec!["epoch".to_owned()]));
}

#[test]
fn a_number_that_is_not_finite_is_found_where_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let (job, file) = (job(), File::create_new(&path).unwrap());
    let layout = SafetensorsLayout::new(&job);
    layout.start(&file).unwrap();
    layout.write(&file, PersistentId::Param(0), 0, &[1.0, f64::INFINITY, f64::NAN]).unwrap();
    let weights = Weights::open(&path, &job).unwrap();
    let tensor = weights.get(PersistentId::Param(0)).unwrap();
    tensor.read(0, &mut [0.0]);
    assert!(weights.check().is_ok(), "a rank looks at what is its own");
    tensor.read(1, &mut [0.0; 2]);
    tensor.read(2, &mut [0.0]);
    let again = Weights::open(&path, &job).unwrap();
    let (whole, mut found) = (again.get(PersistentId::Param(0)).unwrap(), vec![]);
    assert!(whole.pieces(0, 1, DType::F32, &mut |from, bytes| found.push((from, bytes.to_vec()))));
    assert!(again.check().is_ok() && found == [(0, 1f32.to_le_bytes().to_vec())]);
    assert!(!whole.pieces(0, 1, DType::Bf16, &mut |_, _| panic!("it would be converted")));
    assert!(whole.pieces(1, 2, DType::F32, &mut |_, _| ()));
    assert_eq!(again.check().unwrap_err().to_string(), weights.check().unwrap_err().to_string());
    let error = weights.check().unwrap_err().to_string();
    assert!(error.contains("w.safetensors`: element 1 of `w` is inf, with which nothing can be trained"), "{error}");
}

#[test]
fn a_file_of_another_kind_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("poem.txt");
    std::fs::write(&path, "roses are red").unwrap();
    let Err(error) = Weights::open(&path, &job()) else { panic!("it opened") };
    assert!(error.to_string().contains("poem.txt` is not a safetensors file"), "{error}");
}

/// Files that were written before a rate could stay at its peak say nothing of it.
#[test]
fn a_schedule_without_falling_steps_is_read() {
    let schedule = ir::model::Train::default().schedule;
    let mut value = serde_json::to_value(schedule).unwrap();
    assert!(value.as_object_mut().unwrap().remove("falling").is_some());
    assert_eq!(serde_json::from_value::<ir::model::LearningRateSchedule>(value).unwrap(), schedule);
}
