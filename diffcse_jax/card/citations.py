"""BibTeX of the papers whose methods a run can use. An objective names its own (`Objective.papers`)."""

from diffcse_jax.config import Config

BIBTEX = {
    "simcse": """\
@inproceedings{gao2021simcse,
  title = {{SimCSE}: Simple Contrastive Learning of Sentence Embeddings},
  author = {Gao, Tianyu and Yao, Xingcheng and Chen, Danqi},
  booktitle = {Proceedings of the 2021 Conference on Empirical Methods in Natural Language Processing},
  year = {2021}
}""",
    "diffcse": """\
@inproceedings{chuang2022diffcse,
  title = {{DiffCSE}: Difference-based Contrastive Learning for Sentence Embeddings},
  author = {Chuang, Yung-Sung and Dangovski, Rumen and Luo, Hongyin and Zhang, Yang and Chang, Shiyu and
            Solja{\\v{c}}i{\\'c}, Marin and Li, Shang-Wen and Yih, Wen-tau and Kim, Yoon and Glass, James},
  booktitle = {Proceedings of the 2022 Conference of the North American Chapter of the Association for
               Computational Linguistics: Human Language Technologies},
  year = {2022}
}""",
    "simcsepp": """\
@inproceedings{xu2023simcsepp,
  title = {{SimCSE++}: Improving Contrastive Learning for Sentence Embeddings from Two Perspectives},
  author = {Xu, Jiahao and Shao, Wei and Chen, Lihui and Liu, Lemao},
  booktitle = {Proceedings of the 2023 Conference on Empirical Methods in Natural Language Processing},
  pages = {12028--12040},
  year = {2023}
}""",
    "rankcse": """\
@inproceedings{liu2023rankcse,
  title = {{RankCSE}: Unsupervised Sentence Representations Learning via Learning to Rank},
  author = {Liu, Jiduan and Liu, Jiahao and Wang, Qifan and Wang, Jingang and Wu, Wei and Xian, Yunsen and
            Zhao, Dongyan and Chen, Kai and Yan, Rui},
  booktitle = {Proceedings of the 61st Annual Meeting of the Association for Computational Linguistics},
  year = {2023}
}""",
    "infocse": """\
@inproceedings{wu2022infocse,
  title = {{InfoCSE}: Information-aggregated Contrastive Learning of Sentence Embeddings},
  author = {Wu, Xing and Gao, Chaochen and Lin, Zijia and Han, Jizhong and Wang, Zhongyuan and Hu, Songlin},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP 2022},
  pages = {3060--3070},
  year = {2022}
}""",
    "barlow_twins": """\
@inproceedings{zbontar2021barlow,
  title = {{Barlow Twins}: Self-Supervised Learning via Redundancy Reduction},
  author = {Zbontar, Jure and Jing, Li and Misra, Ishan and LeCun, Yann and Deny, St{\\'e}phane},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning},
  year = {2021}
}""",
    "coco_lm": """\
@inproceedings{meng2021cocolm,
  title = {{COCO-LM}: Correcting and Contrasting Text Sequences for Language Model Pretraining},
  author = {Meng, Yu and Xiong, Chenyan and Bajaj, Payal and Tiwary, Saurabh and Bennett, Paul and Han, Jiawei and
            Song, Xia},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2021}
}""",
    "matryoshka": """\
@inproceedings{kusupati2022matryoshka,
  title = {{Matryoshka} Representation Learning},
  author = {Kusupati, Aditya and Bhatt, Gantavya and Rege, Aniket and Wallingford, Matthew and Sinha, Aditya and
            Ramanujan, Vivek and Howard-Snyder, William and Chen, Kaifeng and Kakade, Sham and Jain, Prateek and
            Farhadi, Ali},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2022}
}""",
    "contriever": """\
@article{izacard2022contriever,
  title = {Unsupervised Dense Information Retrieval with Contrastive Learning},
  author = {Izacard, Gautier and Caron, Mathilde and Hosseini, Lucas and Riedel, Sebastian and Bojanowski, Piotr and
            Joulin, Armand and Grave, Edouard},
  journal = {Transactions on Machine Learning Research},
  year = {2022}
}""",
    "wise_ft": """\
@inproceedings{wortsman2022robust,
  title = {Robust Fine-Tuning of Zero-Shot Models},
  author = {Wortsman, Mitchell and Ilharco, Gabriel and Kim, Jong Wook and Li, Mike and Kornblith, Simon and
            Roelofs, Rebecca and Gontijo-Lopes, Raphael and Hajishirzi, Hannaneh and Farhadi, Ali and
            Namkoong, Hongseok and Schmidt, Ludwig},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2022}
}""",
}


def papers_of(config: Config) -> list[str]:
    """Keys of `BIBTEX` for the methods that a run uses, each once: objectives first, in the order of their names."""
    papers = [paper for objective in config.objectives.values() for paper in objective.papers]
    papers += ["matryoshka"] * bool(config.matryoshka.sizes)
    papers += ["contriever"] * (config.data.pairs == "crops")
    papers += ["wise_ft"] * bool(config.eval.interpolate)
    return list(dict.fromkeys(papers))
